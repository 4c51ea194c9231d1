"""Every exception that Outboard raises on purpose.

OutboardError
 ├── ConfigError                 the configuration cannot work (a ValueError)
 │    ├── EngineNotFoundError    no such engine; names those there are
 │    ├── EngineOptionError      unknown or wrongly typed engine option; names the constructor's
 │    └── ModelFileError         a model file is missing, truncated or not what it should be
 ├── InvalidRequestError         this request cannot be served as it is (a ValueError)
 │    ├── PromptTooLongError     the prompt exceeds what the model allows
 │    └── DuplicateRequestError  the request id is in flight already
 ├── RequestFailedError          the engine ended this one request with an error
 ├── SlowReaderError             this stream's reader fell too far behind
 ├── UtilityError                a utility call failed; the engine lives
 │    ├── UtilityNotFoundError   no such @utility method; names those there are
 │    ├── UnsupportedError       this engine cannot do that
 │    ├── UtilityTimeoutError    no answer within the caller's timeout (a TimeoutError)
 │    └── RemoteError            the method raised; carries its type, message and traceback
 ├── ProtocolError               a peer sent something that this version cannot take
 ├── ReductionError              ranks that must step together did not come together; names those that are missing
 ├── EngineStalledError          the engine core makes no progress; says for how long, and what it does
 ├── ScaleError                  the number of ranks was not changed, or not as asked; says how many there are
 │    ├── ScaleInProgressError   another change is under way (retryable)
 │    ├── ScaleRolledBackError   it failed, and all is as it was before
 │    └── NotificationError      an engine core's notification makes no sense; names the rank
 ├── EngineRestartingError       too many requests wait for an engine core that is being started again (retryable)
 └── EngineDeadError             the engine core is gone; says which, how and why
      ├── EngineRestartedError   it died, and is being started again (retryable)
      ├── EngineRemovedError     it was scaled away before this had ended (retryable)
      ├── EngineStartupError     it died or was refused before it was ready
      │    └── EngineStartupTimeout
      │         └── NoRoomError   no machine had room for it in time
      └── ClientClosedError      the client was shut down; nothing died

`error.retryable` says whether the same request may succeed when it is simply made again.
"""

from __future__ import annotations

import signal as _signal
from typing import ClassVar, Self

__all__ = [
    "ClientClosedError",
    "ConfigError",
    "DuplicateRequestError",
    "EngineDeadError",
    "EngineNotFoundError",
    "EngineOptionError",
    "EngineRemovedError",
    "EngineRestartedError",
    "EngineRestartingError",
    "EngineStalledError",
    "EngineStartupError",
    "EngineStartupTimeout",
    "InvalidRequestError",
    "ModelFileError",
    "NoRoomError",
    "NotificationError",
    "OutboardError",
    "PromptTooLongError",
    "ProtocolError",
    "ReductionError",
    "RemoteError",
    "RequestFailedError",
    "ScaleError",
    "ScaleInProgressError",
    "ScaleRolledBackError",
    "SlowReaderError",
    "UnsupportedError",
    "UtilityError",
    "UtilityNotFoundError",
    "UtilityTimeoutError",
]


class OutboardError(Exception):
    """Base of every error of this library.

    Attributes:
        retryable: whether the same request may succeed when it is simply made again.
    """

    retryable: ClassVar[bool] = False


class ConfigError(OutboardError, ValueError):
    """The configuration cannot work; nothing was started, or what was started has been stopped."""


class EngineNotFoundError(ConfigError):
    """No engine of this name. The message names those there are."""


class EngineOptionError(ConfigError):
    """An option is unknown to the engine's constructor, missing, or of the wrong type."""


class ModelFileError(ConfigError):
    """A model file is missing, truncated, or not what its catalogue entry says."""


class InvalidRequestError(OutboardError, ValueError):
    """This request cannot be served as it is. The engine and all other requests are unaffected."""


class PromptTooLongError(InvalidRequestError):
    """The prompt is longer than the model allows."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id is in flight already."""


class RequestFailedError(OutboardError):
    """The engine ended this one request with an error; others go on."""


class SlowReaderError(OutboardError):
    """The reader of one stream fell behind by more than `stream_buffer_bytes`; that stream alone ends."""


class UtilityError(OutboardError):
    """A utility call failed. The engine lives."""


class UtilityNotFoundError(UtilityError):
    """The engine has no `@utility` method of this name. The message names those it has."""


class UnsupportedError(UtilityError):
    """The engine cannot do what was asked, such as to sleep; raised by its defaults, and by engines themselves."""


class UtilityTimeoutError(UtilityError, TimeoutError):
    """A utility call was not answered in time. A late answer is dropped."""


class RemoteError(UtilityError):
    """A utility method raised in the engine core.

    Attributes:
        remote_type: the exception's type, as `module.Class`.
        remote_message: its text.
        remote_traceback: the formatted traceback of the engine core.
    """

    def __init__(self, remote_type: str, remote_message: str, remote_traceback: str) -> None:
        super().__init__(f"{remote_type}: {remote_message}")
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.remote_type}: {self.remote_message}\n\nIn the engine core:\n{self.remote_traceback.rstrip()}"


class ProtocolError(OutboardError):
    """A peer sent something that this version of the protocol cannot take."""


class ReductionError(OutboardError):
    """Ranks that must step together did not come together; ends their engine cores. The message names the missing."""


class EngineStalledError(OutboardError):
    """An engine core makes no progress although it has work; it may come back.

    Attributes:
        rank, incarnation: which one.
        age: seconds since it last gave a sign of progress.
        process: what the system says of it: "stopped", "blocked", "running", "sleeping" or "gone".
        stack: its Python stack; "" where it could not give any.
    """

    def __init__(
        self, reason: str, *, rank: int = 0, incarnation: int = 0, age: float = 0.0, process: str = "", stack: str = ""
    ) -> None:
        super().__init__(reason)
        self.rank = rank
        self.incarnation = incarnation
        self.age = age
        self.process = process
        self.stack = stack

    def __str__(self) -> str:
        reason = str(self.args[0])
        return f"{reason}\n\nWhere it is:\n{self.stack.rstrip()}" if self.stack else reason


class ScaleError(OutboardError):
    """The number of ranks was not changed, or not as asked."""


class ScaleInProgressError(ScaleError):
    """Another change of the number of ranks is under way."""

    retryable = True


class ScaleRolledBackError(ScaleError):
    """The change failed; there are as many ranks as before, and they serve."""


class NotificationError(ScaleError):
    """A notification of an engine core is unknown, came twice, or belongs to no change under way.

    Attributes:
        rank: who sent it.
    """

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(reason)
        self.rank = rank


class EngineRestartingError(OutboardError):
    """An engine core is being started again, and `max_queued` requests wait for it already."""

    retryable = True


class EngineDeadError(OutboardError):
    """An engine core is gone, and what waited for it has ended.

    Every waiter gets an instance of its own (see `copy`), so that tracebacks do not pile up on a shared one.

    Attributes:
        reason: one line that says what happened.
        rank: index of the engine core in its group.
        pid: process id of the engine core, if it had one.
        incarnation: how often this rank had been started before.
        phase: "start-up", "running" or "stopping".
        exit_code: its exit code: 0 or more, or minus the signal that ended it; None if it is unknown.
        remote_type, remote_message, remote_traceback: the exception raised in the engine core, "" if there was none.
        stderr_tail: the last lines that it wrote to stderr.
        lost: what became of the node where it ran, if that is why: "silent" for longer than `NetworkConfig.patience`,
            "stopped" (it has said that it ends), or in a Ray cluster "preempted", "machine" (it has left the cluster),
            or "actor" (its process has ended); "": the node was not why, or there was none.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int = 0,
        pid: int | None = None,
        incarnation: int = 0,
        phase: str = "running",
        exit_code: int | None = None,
        remote_type: str = "",
        remote_message: str = "",
        remote_traceback: str = "",
        stderr_tail: str = "",
        lost: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rank = rank
        self.pid = pid
        self.incarnation = incarnation
        self.phase = phase
        self.exit_code = exit_code
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.stderr_tail = stderr_tail
        self.lost = lost

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended the engine core, such as "SIGKILL"; None if none did."""
        return signal_name(self.exit_code)

    def copy(self) -> Self:
        """A fresh instance with the same facts and cause, and no traceback of its own."""
        facts = {key: value for key, value in vars(self).items() if key != "reason"}
        fresh = type(self)(self.reason, **facts)
        fresh.__cause__ = self.__cause__
        return fresh

    def __str__(self) -> str:
        lines = [self.reason]
        if self.remote_type:
            lines += ["", "Raised in the engine core:", self.remote_traceback.rstrip()]
        if self.stderr_tail:
            lines += ["", "The last of its stderr:", self.stderr_tail.rstrip()]
        return "\n".join(lines)


class EngineRestartedError(EngineDeadError):
    """An engine core died, and is being started again; what it was at has ended."""

    retryable = True


class EngineRemovedError(EngineDeadError):
    """This rank was scaled away, and its time to end what it was at was over."""

    retryable = True


class EngineStartupError(EngineDeadError):
    """An engine core died, failed or was refused before it was ready."""


class EngineStartupTimeout(EngineStartupError):
    """An engine core was not ready within `startup_timeout`; it has been killed."""


class NoRoomError(EngineStartupTimeout):
    """No node or Ray cluster had room for an engine core in time. The message says what is missing."""


class ClientClosedError(EngineDeadError):
    """The client was shut down; what still waited has ended."""


def signal_name(exit_code: int | None) -> str | None:
    """Name of the signal behind a negative exit code, as `subprocess` reports it; None if there is none."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return _signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
