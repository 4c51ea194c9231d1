"""A head's handle of an engine core that runs on a node."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from outboard.errors import EngineDeadError
from outboard.launch.process import death_error, died
from outboard.protocol.messages import ErrorReport, Ready
from outboard.protocol.nodes import RankExited, SignalRank, StartRank, WatchRank

__all__ = ["RemoteProcess"]

_E = TypeVar("_E", bound=EngineDeadError)


class _Wanted(IntEnum):
    RUN = 0
    TERMINATE = 1
    KILL = 2


class RemoteProcess:
    """As `EngineProcess`, by way of the node. Made by `NodeDesk.start`; belongs to its thread but for `release`.

    Args:
        rank, incarnation: which engine core this is.
        env: environment variables of its own.
        node: name of the node.
        tell: sends a message to the node.

    Attributes:
        node: name of the node.
        exited: how it ended, as the node told; None: it has not.
        lost: why nothing more will be heard of it; "": that is not so.
        lost_as: the same in one word, see `EngineDeadError.lost`.
        node_leaves: why its node ends it, such as "is being stopped"; "": it does not.
    """

    def __init__(
        self, rank: int, incarnation: int, env: dict[str, str], node: str, tell: Callable[[Any], None]
    ) -> None:
        self.node = node
        self.exited: RankExited | None = None
        self.lost = self.lost_as = ""
        self.node_leaves = ""
        self._rank, self._incarnation = rank, incarnation
        self._env = env
        self._tell = tell
        self._pid: int | None = None
        self._started = False
        self._wanted = _Wanted.RUN
        self._watch: WatchRank | None = None
        self._given_up = False
        self._sentinel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        tell(StartRank(rank, incarnation, env))

    @property
    def key(self) -> tuple[int, int]:
        """Rank and incarnation."""
        return self._rank, self._incarnation

    @property
    def sentinel(self) -> int:
        """Readable once it has ended, or is lost. -1 after `close`."""
        return self._sentinel

    @property
    def over(self) -> bool:
        """Whether nothing more is to be told about it."""
        return self.exited is not None or bool(self.lost)

    # --- for the rank ---

    def identify(self, pid: int, pgid: int) -> None:
        """Note what the engine core says of itself in its HELLO."""
        self._pid = pid
        self._started = True

    def watch(self, pid: int, ready: Ready) -> None:
        """Have its progress told from now on."""
        self._watch = WatchRank(*self.key, pid, ready.progress_fd, ready.stack_fd, ready.stack_signal)
        self._tell(self._watch)

    def terminate(self) -> None:
        """Ask the engine core for a clean stop."""
        self._want(_Wanted.TERMINATE)

    def kill(self) -> None:
        """Have all of it killed."""
        self._want(_Wanted.KILL)

    def end(self, timeout: float) -> int:
        """As `kill`; does not wait for a node. It counts as ended, whatever the node has to say."""
        self.kill()
        self._given_up = True
        return self._exit_code or 0

    def close(self) -> None:
        """Releases the descriptor. One that has not ended is killed; its place on the node is taken until then."""
        if not self.over:
            self.kill()
        sentinel, self._sentinel = self._sentinel, -1
        if sentinel >= 0:
            os.close(sentinel)

    def release(self) -> None:
        """For finalizers: its node ends all it has once the head has gone, which comes next."""
        self._wanted = _Wanted.KILL

    def abandon(self) -> None:
        """As `close`."""
        self.close()

    def death(self, phase: str, cls: type[_E], reason: str | None = None, **facts: Any) -> _E:
        """The error that says how this engine core ended."""
        exited = self.exited
        report = (exited.report if exited is not None else None) or ErrorReport("", "", "")
        known = {"rank": self._rank, "incarnation": self._incarnation, "phase": phase, "pid": self._pid}
        known |= {"exit_code": self._exit_code, "stderr_tail": exited.stderr_tail if exited is not None else ""}
        known |= {f"remote_{name}": getattr(report, name) for name in ("type", "message", "traceback")}
        known["lost"] = self.lost_as or ("stopped" if self.node_leaves and self._wanted is _Wanted.RUN else "")
        known |= facts
        if exited is not None and exited.failure:
            reason = reason or f"Engine core rank {self._rank} cannot be started on node {self.node}: {exited.failure}"
        elif self.lost:
            reason = reason or died(known, self.lost, self.node)
        elif self.node_leaves and self._wanted is _Wanted.RUN:
            reason = reason or died(known, f"its node {self.node} {self.node_leaves}", self.node)
        return death_error(cls, reason, known, exited.verdict if exited is not None else "", self.node)

    @property
    def _exit_code(self) -> int | None:
        if self.exited is not None:
            return self.exited.exit_code
        return -9 if self._given_up else None

    # --- for the desk ---

    def on_started(self) -> None:
        """The node has started it."""
        self._started = True

    def on_exited(self, message: RankExited) -> None:
        """The node tells how it ended."""
        if not self.over:
            self.exited = message
            self._pid = message.pid or self._pid
            self._tell_rank()

    def lose(self, reason: str, word: str) -> None:
        """Nothing more will be heard of it, for this reason: such as "its node has been silent for 10 s"; "silent"."""
        if not self.over:
            self.lost, self.lost_as = reason, word
            self._tell_rank()

    def unanswered(self) -> list[Any]:
        """What the node has not answered yet, and must be told again."""
        if self.over:
            return []
        messages: list[Any] = []
        if not self._started and self._wanted is not _Wanted.KILL:
            messages.append(StartRank(self._rank, self._incarnation, self._env))
        if self._watch is not None:
            messages.append(self._watch)
        if self._wanted is not _Wanted.RUN:
            messages.append(self._signal())
        return messages

    def _want(self, wanted: _Wanted) -> None:
        if wanted > self._wanted and not self.over:
            self._wanted = wanted
            self._tell(self._signal())

    def _signal(self) -> SignalRank:
        return SignalRank(self._rank, self._incarnation, self._wanted is _Wanted.KILL)

    def _tell_rank(self) -> None:
        if self._sentinel >= 0:
            os.eventfd_write(self._sentinel, 1)
