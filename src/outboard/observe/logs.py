"""Logs of the server: lines of text or of JSON, and one line a request."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

import msgspec

from outboard.observe.record import RequestRecord

__all__ = ["configure_logs", "log_request"]

_requests = logging.getLogger("outboard.requests")
# What a record has that nobody gave it; the rest are facts of the event.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and whatever facts the event has."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {name: value for name, value in _facts(record).items() if name not in document}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(document, enc_hook=repr).decode()
        except Exception:  # a lone surrogate, such as in the name of a file: the line must not be lost
            return json.dumps(document, default=repr, skipkeys=True)


class _TextFormatter(logging.Formatter):
    """Facts behind the message, as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return " ".join([text, *(f"{name}={value}" for name, value in _facts(record).items())])


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """What the event says of itself. Names with an underscore are notes of other libraries, such as Ray's."""
    return {n: value for n, value in vars(record).items() if n not in _USUAL and not n.startswith("_")}


def configure_logs(form: Literal["text", "json"], level: str) -> None:
    """Has all logs of this process go to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("outboard").setLevel(level.upper())


def log_request(record: RequestRecord) -> None:
    """One line for a request that has ended. It has no prompt unless the record does."""
    facts = {name: value for name, value in msgspec.structs.asdict(record).items() if value not in (None, "", [])}
    for name in ("started", "trace_parent", "trace_state"):
        facts.pop(name, None)
    for name in ("duration", "queue_time", "time_to_first_token"):
        if name in facts:
            facts[name] = round(facts[name], 6)
    _requests.log(logging.WARNING if record.status >= 500 else logging.INFO, "request", extra=facts)
