"""Lines of the log: text or JSON, with the facts of an event."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from outboard.observe.logs import configure_logs, log_request
from outboard.observe.record import RequestRecord


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Configures logs; a function to get what was written. All is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("outboard")
    before = root.handlers[:], root.level, ours.level
    root.handlers = []
    stderr = io.StringIO()

    def get(form: Literal["text", "json"] | None = None, level: str = "info") -> list[str]:
        if form is not None:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", stderr)
                configure_logs(form, level)
        return stderr.getvalue().splitlines()

    yield get
    root.handlers, root.level = before[:2]
    ours.setLevel(before[2])


def test_a_line_of_json(lines: Any) -> None:
    lines("json")
    logging.getLogger("outboard.serve").warning("hello %s", "wörld\nagain", extra={"rank": 3, "what": object})
    [line] = lines()
    document = json.loads(line)
    assert document["level"] == "warning" and document["logger"] == "outboard.serve"
    assert document["message"] == "hello wörld\nagain"
    assert document["rank"] == 3 and document["what"] == repr(object)
    assert document["time"].endswith("Z") and len(document["time"]) == len("2026-01-01T00:00:00.000Z")
    assert set(document) == {"time", "level", "logger", "message", "rank", "what"}


def test_an_exception_is_in_its_line(lines: Any) -> None:
    lines("json")
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("outboard.serve").exception("failed")
    [line] = lines()
    assert "ValueError: odd" in json.loads(line)["exception"]


def test_facts_cannot_take_the_place_of_what_each_line_has(lines: Any) -> None:
    lines("json")
    logging.getLogger("outboard.serve").info("hello", extra={"level": "mine", "time": "never", "logger": "x"})
    document = json.loads(lines()[0])
    assert (document["level"], document["logger"]) == ("info", "outboard.serve")
    assert document["time"] != "never"


@pytest.mark.parametrize("odd", ["\ud800", 1 << 80, {1, 2}, {("a", 1): 2}, float("nan"), b"\xff"])
def test_facts_that_json_does_not_know_lose_no_line(lines: Any, odd: Any) -> None:
    lines("json")
    logging.getLogger("outboard.serve").info("hello", extra={"fact": odd})
    [line] = lines()
    assert json.loads(line)["message"] == "hello"


def test_a_line_of_text(lines: Any) -> None:
    lines("text")
    logging.getLogger("outboard.serve").info("hello", extra={"rank": 3, "path": "/v1/models"})
    [line] = lines()
    assert line.endswith("INFO outboard.serve: hello rank=3 path=/v1/models")


def test_levels(lines: Any) -> None:
    lines("text", "warning")
    logging.getLogger("outboard.serve").info("no")
    logging.getLogger("outboard.serve").warning("yes")
    logging.getLogger("uvicorn.error").info("no")
    logging.getLogger("uvicorn.error").error("yes")
    assert len(lines()) == 2
    lines("text", "debug")
    logging.getLogger("outboard.serve").debug("yes")
    logging.getLogger("asyncio").debug("no")
    assert len(lines()) == 3


_RECORD: dict[str, Any] = {
    "request_id": "r",
    "path": "/v1/completions",
    "status": 200,
    "started": 1.0,
    "duration": 0.123456789,
    "finish_reasons": ["stop"],
    "prompts": 1,
    "prompt_tokens": 3,
    "time_to_first_token": 0.1,
    "trace_parent": "00-x",
    "trace_state": "a=b",
}


def test_the_line_of_a_request(lines: Any) -> None:
    lines("json")
    log_request(RequestRecord(**_RECORD))
    document = json.loads(lines()[0])
    assert (document["level"], document["logger"], document["message"]) == ("info", "outboard.requests", "request")
    assert document["duration"] == 0.123457 and document["finish_reasons"] == ["stop"]
    assert document["completion_tokens"] == 0 and document["streamed"] is False
    assert not {"prompt", "key", "error", "queue_time", "started", "trace_parent", "trace_state"} & set(document)


def test_a_prompt_is_in_it_where_the_record_has_one(lines: Any) -> None:
    lines("text")
    log_request(RequestRecord(**_RECORD, prompt=repr("my\nprompt"), key=0))
    [line] = lines()
    assert r"prompt='my\nprompt'" in line and "key=0" in line


@pytest.mark.parametrize(("status", "level"), [(200, "info"), (404, "info"), (499, "info"), (500, "warning")])
def test_errors_of_the_server_are_warnings(lines: Any, status: int, level: str) -> None:
    lines("json")
    log_request(RequestRecord(**{**_RECORD, "status": status}, error="x"))
    assert json.loads(lines()[0])["level"] == level
