"""What a schedule leaves behind: processes, descriptors, files, threads, mappings, log lines, warnings."""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

__all__ = ["Watch"]

_MARK = "OUTBOARD_CHAOS"
# How long things may take to go away by themselves.
_GRACE = 6.0


class Watch:
    """Notes what there is before, and tells what there is more afterwards. A context manager.

    Attributes:
        directory: for temporary files, sockets among them; has a name short enough for those.
        errors: log records of level ERROR and above.
        unraisable: exceptions that nobody could catch, and warnings.
        stderr: all that was written to the standard error meanwhile, by this process and those it started.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.unraisable: list[str] = []
        self.stderr = ""
        self._handler = _Collector(self.errors)

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.home = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self._mark = secrets.token_hex(8)
        self._environment = {name: os.environ.get(name) for name in (_MARK, "TMPDIR")}
        os.environ[_MARK], os.environ["TMPDIR"] = self._mark, str(self.directory)
        self._tempdir, tempfile.tempdir = tempfile.tempdir, str(self.directory)
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = self._on_unraisable
        threading.excepthook = self._on_thread_exception
        self._warnings = warnings.catch_warnings(record=True)
        self._warned: list[Any] = self._warnings.__enter__() or []
        warnings.simplefilter("always")
        logging.getLogger().addHandler(self._handler)
        sys.stderr.flush()
        self._real_stderr = os.dup(2)
        self._stderr_path = self.home / "stderr"
        with self._stderr_path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        gc.collect()
        self._before = self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        sys.stderr.flush()
        os.dup2(self._real_stderr, 2)
        os.close(self._real_stderr)
        self.stderr = self._stderr_path.read_text(errors="replace")
        logging.getLogger().removeHandler(self._handler)
        self.unraisable += [f"{one.category.__name__}: {one.message}" for one in self._warned]
        self._warnings.__exit__(None, None, None)
        sys.unraisablehook, threading.excepthook = self._hooks
        tempfile.tempdir = self._tempdir
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for path in (self.directory, self.home):
            shutil.rmtree(path, ignore_errors=True)

    def left(self) -> list[str]:
        """What is there that was not before; waits a little for it to go. Processes that stay are killed."""
        deadline = time.monotonic() + _GRACE
        while True:
            gc.collect()
            found = self._differences()
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for process in self._processes():
            process.kill()
        return found

    def _differences(self) -> list[str]:
        found = [f"process {process.pid}: {_command(process)}" for process in self._processes()]
        found += [f"file {path.name}" for path in self.directory.rglob("*")]
        now = self._look()
        for what, counts in now.items():
            more = counts - self._before[what]
            found += [f"{count} more {what}: {name}" for name, count in more.items()]
        return found

    def _processes(self) -> list[psutil.Process]:
        """Those that carry our mark, whoever their parent is by now; and children that nobody has waited for."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in Path(entry.path, "environ").read_bytes():
                        found.append(psutil.Process(int(entry.name)))
                except (OSError, psutil.Error):
                    continue
        known = {process.pid for process in found}
        return found + [child for child in psutil.Process().children() if child.pid not in known]

    @staticmethod
    def _look() -> dict[str, Counter[str]]:
        descriptors: Counter[str] = Counter()
        for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
            except OSError:
                continue
            descriptors[re.sub(r"\d+", "#", target)] += 1
        mappings = Counter(
            line.split(maxsplit=5)[5].strip()
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:" in line
        )
        threads = Counter(thread.name for thread in threading.enumerate())
        return {
            "descriptors": descriptors,
            "mappings": mappings,
            "threads": threads,
            "native threads": Counter({"any": len(os.listdir("/proc/self/task"))}),  # noqa: PTH208
        }

    def _on_unraisable(self, what: Any) -> None:
        self.unraisable.append(f"unraisable {what.exc_type.__name__}: {what.exc_value} in {what.object!r:.100}")

    def _on_thread_exception(self, what: Any) -> None:
        lines = traceback.format_exception(what.exc_type, what.exc_value, what.exc_traceback)
        self.unraisable.append(f"in thread {what.thread}: {''.join(lines)}")


class _Collector(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self._errors.append(text)


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error as error:
        return str(error)
