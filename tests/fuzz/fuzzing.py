"""Feeds bad messages to everything that takes bytes from outside, and notes what it must not do with them.

A decoder may raise the one error of its contract, or drop the message as its contract says. A find is any other
exception, an error that it had to log as unexpected, more than a second for one message, or much memory for it.

A find is repeated with `replay`; those that were mended are kept in `cases/`.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType

from mutation import Mutator
from targets import TARGETS, Frames, Target

__all__ = ["Find", "Fuzzer", "Outcome", "fuzz", "quiet"]

# Seconds of CPU that one message may take.
LONGEST = 1.0
# Bytes by which the resident memory may be higher, at any time while one message is handled, than before.
MOST_MEMORY = 64 << 20
# Messages between two looks at the memory and two arms of the alarm.
_BATCH = 500
_ALARM = 20.0


class _Hung(BaseException):
    """The alarm went off. Not an `Exception`: nobody on the way may catch it."""


class _Unexpected(Exception):
    """Something was logged as an error."""


@dataclass
class Find:
    """A message that did what none may do."""

    target: str
    frames: Frames
    what: str

    @property
    def kind(self) -> str:
        """What it has in common with others like it."""
        return re.sub(r"[0-9.e+-]+", "#", self.what)[:80]

    def __str__(self) -> str:
        frames = [
            frame.hex() if len(frame) < 2000 else f"{frame[:2000].hex()}... ({len(frame)})" for frame in self.frames
        ]
        return f"{self.target}: {self.what}\n    frames = {frames}"


@dataclass
class Outcome:
    """What a run found, and what it did to know that it did something."""

    frames: int
    accepted: dict[str, int]
    finds: list[Find]
    seconds: float


class Fuzzer:
    """Mutates the messages of one target and feeds them to it. The same messages for the same seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._target: Target = TARGETS[name]()
        self._mutator = Mutator(
            [*self._target.samples, *self._target.seeds], Random(f"{name} {seed}"), self._target.values
        )
        for sample in self._target.samples:
            if not self._target.feed(sample):
                raise AssertionError(f"{name} does not accept its own sample {sample}")

    def run(self, count: int) -> tuple[int, list[Find]]:
        """Feeds `count` messages and the seeds; how many were accepted, and the finds, one of each kind.

        After ten kinds it stops: whatever is wrong then need not be seen any more often.
        """
        accepted = 0
        finds: dict[str, Find] = {}
        for seed in self._target.seeds:
            if find := self.replay(seed):
                finds.setdefault(find.kind, find)
        for start in range(0, count, _BATCH):
            frames = [self._mutator.make() for _ in range(min(_BATCH, count - start))]
            with _memory() as used:
                for message in frames:
                    result = self._one(message)
                    if isinstance(result, Find):
                        finds.setdefault(result.kind, result)
                    else:
                        accepted += result
            if used() > MOST_MEMORY:
                for message in frames:
                    if find := self.replay(message):
                        finds.setdefault(find.kind, find)
            if len(finds) >= 10:
                break
        return accepted, list(finds.values())

    def replay(self, frames: Frames) -> Find | None:
        """Feeds one message, and looks at everything."""
        with _memory() as used:
            result = self._one(frames)
        if isinstance(result, Find):
            return result
        if used() > MOST_MEMORY:
            return Find(self.name, frames, f"it took {used() >> 20} MiB")
        return None

    def _one(self, frames: Frames, again: bool = False) -> bool | Find:
        started = time.perf_counter()
        cpu = time.thread_time() if again else 0.0
        try:
            accepted = self._target.feed(frames)
        except _Hung:
            signal.setitimer(signal.ITIMER_REAL, _ALARM)
            return Find(self.name, frames, "it hung")
        except BaseException as error:
            return Find(self.name, frames, f"{type(error).__name__}: {error}")
        if time.perf_counter() - started > LONGEST:
            # Perhaps this process had to wait for others.
            if not again:
                return self._one(frames, again=True)
            if time.thread_time() - cpu > LONGEST:
                return Find(self.name, frames, f"it took {time.thread_time() - cpu:.1f} s")
        return accepted


def fuzz(count: int, seed: int = 0) -> Outcome:
    """Feeds `count` messages, shared out among all targets by their weight."""
    started = time.monotonic()
    outcome = Outcome(0, {}, [], 0.0)
    total = sum(target.weight for target in TARGETS.values())
    with quiet():
        for name, target in TARGETS.items():
            share = max(1, round(count * target.weight / total))
            accepted, finds = Fuzzer(name, seed).run(share)
            outcome.frames += share
            outcome.accepted[name] = accepted
            outcome.finds += finds
    outcome.seconds = time.monotonic() - started
    return outcome


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of dropped messages are not written; errors raise. A message that hangs is interrupted."""
    logger = logging.getLogger("outboard")
    level, handler = logger.level, _Raising(logging.ERROR)
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)
    before = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Raising(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if record.exc_info else None
        raise _Unexpected(f"logged {record.getMessage()!r}: {type(cause).__name__}: {cause}")


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise _Hung


@contextmanager
def _memory() -> Iterator[_Used]:
    """By how much the resident memory was ever higher than at the start; with the alarm armed meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    used = _Used(_resident("VmRSS"))
    signal.setitimer(signal.ITIMER_REAL, _ALARM)
    try:
        yield used
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        used.peak = _resident("VmHWM")


class _Used:
    def __init__(self, before: int) -> None:
        self.before = before
        self.peak = before

    def __call__(self) -> int:
        return self.peak - self.before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"\n{field}:")[2].split(maxsplit=1)[0]) << 10
