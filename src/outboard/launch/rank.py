"""One rank as the launcher drives it: its process and its handshake, as its supervisor decides. Nothing here waits."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from outboard.config import FaultConfig
from outboard.errors import ConfigError, EngineDeadError, EngineStartupError, NoRoomError
from outboard.launch.handshake import EngineHandshake, HandshakeState
from outboard.launch.rank_process import NoRoom, RankProcess, RankStarter, Unplaceable
from outboard.launch.startup import startup_failure, startup_timeout
from outboard.launch.supervisor import RankSupervisor
from outboard.protocol.control import (
    EngineDeath,
    EngineState,
    EngineStatus,
    StallReport,
)
from outboard.protocol.messages import ErrorReport, Init, Ready

__all__ = ["EngineRank", "GroupFacts"]

logger = logging.getLogger("outboard.launch")

# An engine core that has told why it fails gets a moment to end by itself, so that its exit code can be told.
_EXIT_GRACE = 1.0
# A killed process with much memory, or a GPU, needs some time to go. After this it is left behind.
_KILL_BOUND = 15.0


class GroupFacts(msgspec.Struct, frozen=True):
    """Fields of `Init` that all ranks of a group's incarnation share; named as there."""

    data_parallel_size: int
    group: int
    first_coordinator: int
    step_sync_address: str
    rendezvous: str


class EngineRank:
    """Owns the process of one rank, one incarnation after the other. Belongs to the launcher's thread.

    Args:
        init: what to run; its rank is this one, its incarnation the first.
        token: the session's secret.
        starter: starts its processes.
        faults: time limits and the restart policy.
        env: environment variables of its own.
        group_facts: what to tell an incarnation of its group.

    Attributes:
        supervisor: its state.
        process: of the incarnation that runs; None between two, and while there is no room for it.
        waits: why there is no room for the incarnation that is to start; "" where none waits.
        peer: the ZeroMQ identity on the control channel of who said HELLO; b"" before.
        lockstep: whether its engine has said that ranks step together.
        can_reinitialize: whether its engine has said that its group may change its size.
        joining: whether it is new, and its group does not count on it yet.
        failure: what to raise where the first start-up failed; None otherwise.
    """

    def __init__(
        self,
        init: Init,
        token: str,
        starter: RankStarter,
        faults: FaultConfig,
        env: dict[str, str],
        group_facts: Callable[[], GroupFacts],
    ) -> None:
        self._group_facts = group_facts
        self._fallen = False  # it is being ended because another rank has ended; its death has been told
        self.lockstep = False
        self.can_reinitialize = False
        self.joining = init.joining
        self._init = init
        self._env = env
        self._token = token
        self._starter = starter
        self._faults = faults
        self._handshake = EngineHandshake(token, init)
        self._deadline: float | None = None  # of start-up, of a grace, or of a kill
        self._killed_by: float | None = None  # since when it is being killed
        self._reason: str | None = None  # why we kill it
        self._told: ErrorReport | None = None
        self._timed_out: HandshakeState | None = None  # how far it had come when its start-up took too long
        self._ready: Ready | None = None
        self._last_ready: Ready | None = None  # of the latest incarnation that was
        self._death: EngineDeath | None = None
        self._stall: StallReport | None = None
        self.supervisor = RankSupervisor(faults.restart, init.incarnation)
        self._pid: int | None = None  # of the incarnation that runs, or ran last
        self.process: RankProcess | None = None
        self.waits = ""
        self._told_of_wait = False
        self.peer = b""
        self.failure: ConfigError | EngineDeadError | None = None

    @property
    def rank(self) -> int:
        return self._init.rank

    @property
    def pid(self) -> int | None:
        """Process id of the incarnation that runs, or ran last; None before the first said HELLO."""
        return self._pid

    @property
    def node(self) -> str:
        """Name of the node where its process runs; "": this host, or it has none."""
        return self.process.node if self.process is not None else ""

    @property
    def is_ready(self) -> bool:
        """Whether the incarnation that runs has said READY."""
        return self._ready is not None and self.process is not None and not self._fallen

    @property
    def death(self) -> str:
        """How the last incarnation that ended did so; "": none has."""
        return self._death.reason if self._death is not None else ""

    def due(self, may_begin: bool) -> float | None:
        """When to call `tick`; None: not before something else happens."""
        restart_at = self.supervisor.restart_at if may_begin else None
        return min((time for time in (self._deadline, restart_at) if time is not None), default=None)

    def status(self, version: int) -> EngineStatus:
        """What front ends are told."""
        ready, last, supervisor = self._ready, self._last_ready, self.supervisor
        serving = supervisor.state in (EngineState.READY, EngineState.STALLED) and ready is not None and not self.node
        return EngineStatus(
            version,
            self.rank,
            supervisor.incarnation,
            supervisor.state,
            pid=self._pid,
            info=last.info if last is not None else None,
            typed_utilities=last.typed_utilities if last is not None else [],
            death=self._death,
            stall=self._stall,
            progress_fd=ready.progress_fd if serving and ready is not None else -1,
            stack_fd=ready.stack_fd if serving and ready is not None else -1,
            stack_signal=ready.stack_signal if serving and ready is not None else 0,
            node=self.node,
            waits=self.waits,
        )

    # --- its life ---

    def start(self, now: float) -> None:
        """Starts the process of the current incarnation; where there is no room for it, `tick` tries again.

        Raises OSError if no process is to be had.
        """
        incarnation = self.supervisor.incarnation
        try:
            self.process = self._starter.start(self.rank, incarnation, self._env)
        except NoRoom as reason:
            self._wait(reason, now)
            return
        except Unplaceable as error:
            self._wait_no_more(f"engine core rank {self.rank} cannot be started: {error}", now, error.error)
            return
        self.waits = ""
        self._told_of_wait = False
        init = msgspec.structs.replace(self._init, incarnation=incarnation, joining=self.joining)
        if not self.joining:  # else it is told later
            init = msgspec.structs.replace(init, **msgspec.structs.asdict(self._group_facts()))
        self._fallen = False
        self._init = init
        told = msgspec.structs.replace(init, sys_path=[]) if self.process.node else init
        self._handshake = EngineHandshake(self._token, told)
        self.peer = b""
        self._ready = self._killed_by = self._reason = self._told = self._timed_out = None
        self._deadline = now + self._faults.startup_timeout

    def _wait(self, reason: NoRoom, now: float) -> None:
        """There is no room. The first incarnation waits no longer than it may take to start, others for ever."""
        if not reason.on_its_way and not self._told_of_wait:
            self._told_of_wait = True
            logger.warning("%s", reason)
        if not self.waits:
            self._ready = None
            self._deadline = now + self._faults.startup_timeout if self.supervisor.is_first else None
        self.waits = str(reason)

    def start_or_die(self, now: float) -> None:
        """As `start`; where no process is to be had, the incarnation has died."""
        try:
            self.start(now)
        except OSError as error:
            self.waits = ""
            self._died_unstarted(f"engine core rank {self.rank} cannot be started: {error}", now)

    def receive(self, sender: bytes, frames: list[bytes], now: float) -> bytes | None:
        """Takes a message of the handshake; what to send back to `sender`, or None."""
        handshake = self._handshake
        answer = handshake.receive(sender, frames)
        if self.process is None or self._killed_by is not None:
            return answer
        if handshake.hello is not None and not self.peer:
            self.peer = sender
            self.process.identify(handshake.hello.pid, handshake.hello.pgid)
            self._pid = handshake.hello.pid
        if handshake.ready is not None and self._ready is None:
            self._ready = self._last_ready = handshake.ready
            self.lockstep = handshake.ready.lockstep
            self.can_reinitialize = handshake.ready.can_reinitialize
            self._deadline = None
            self.supervisor.ready()
            assert self._pid is not None  # it has said HELLO
            self.process.watch(self._pid, handshake.ready)
        elif handshake.failure is not None:
            self._deadline = min(self._deadline or now, now + _EXIT_GRACE)
        return answer

    def tick(self, now: float, may_begin: bool) -> None:
        """Does what is due: a restart, if it may begin, or an end to what took too long."""
        supervisor = self.supervisor
        if may_begin and supervisor.restart_at is not None and now >= supervisor.restart_at:
            supervisor.begin()
            self.start_or_die(now)
            return
        if self.waits:
            self.start_or_die(now)
        if self._deadline is not None and now >= self._deadline:
            self._on_deadline(now)

    def stall(self, report: StallReport) -> bool:
        """Somebody waits for it in vain. Returns whether that is news."""
        if not self.supervisor.stalled():
            return False
        self._stall = report
        return True

    def progressed(self) -> bool:
        """It goes on. Returns whether that is news."""
        if not self.supervisor.progressed():
            return False
        self._stall = None
        return True

    def kill(self, now: float, reason: str | None = None, report: ErrorReport | None = None) -> None:
        """Ends the process at once; `exited` follows. What comes then is up to the supervisor.

        Args:
            reason: what its death report says, in place of how it ended.
            report: an exception that it has told of by other ways than its report page.
        """
        if self.waits:
            self._wait_no_more(reason or f"engine core rank {self.rank} is not wanted any more", now)
        if self.process is not None and self._killed_by is None:
            self._reason = reason
            self._told = report
            self._killed_by = now
            self._deadline = now + _KILL_BOUND
            self.process.kill()

    def end_with_group(self, now: float, reason: str) -> bool:
        """Another rank, without which this one can do nothing, has ended. Returns whether that is news.

        Its state is at once that of a dead one, so that no front end gives it what the other one had.
        """
        if self.process is None or self._fallen:
            return False
        self._fallen = True
        phase = "start-up" if self._ready is None else "running"
        error = EngineDeadError(
            f"Engine core rank {self.rank} (pid {self._pid}) {reason}",
            rank=self.rank,
            incarnation=self._init.incarnation,
            pid=self._pid,
            phase=phase,
        )
        self._death = EngineDeath.of(error)
        self.supervisor.died(now)
        self._tell_of_budget()
        self._stall = None
        self.peer = b""
        self.kill(now)
        return True

    def stop(self, now: float, timeout: float) -> None:
        """Asks for its end, within `timeout` seconds; a second call may shorten that."""
        self.supervisor.stop()
        if self.waits:
            self._wait_no_more(f"engine core rank {self.rank} was stopped", now)
        if self.process is None or self._killed_by is not None:
            return
        if timeout <= 0:
            self.kill(now)
            return
        self._deadline = now + timeout
        self.process.terminate()

    def leave(self, now: float) -> None:
        """Its end is near, and wanted: it serves on, and is not started again. One that does not serve ends at once."""
        self.supervisor.stop()
        if not self.is_ready:
            self.kill(now)

    def exited(self, now: float) -> None:
        """The process has ended, and all that belongs to it."""
        process, starting = self.process, self._ready is None
        assert process is not None  # its sentinel told
        if not self._fallen:
            failure = self._what_failed(process, starting)
            self._death = EngineDeath.of(_death_behind(failure))
            self.supervisor.died(now)
            self._tell_of_budget()
            if starting and self.supervisor.state is EngineState.DEAD and self.supervisor.is_first:
                self.failure = failure
        process.close()
        self.process = None
        self._deadline = self._stall = None
        self.peer = b""

    def _tell_of_budget(self) -> None:
        """Where there had been restarts, and there will be none: that is why it stays dead."""
        policy, death = self._faults.restart, self._death
        if self.supervisor.state is EngineState.DEAD and not self.supervisor.is_first and death is not None:
            spent = f"It stays dead: {policy.max_restarts} restarts in {policy.window:g} s are all that is allowed."
            self._death = msgspec.structs.replace(death, reason=f"{death.reason} {spent}")

    def _what_failed(self, process: RankProcess, starting: bool) -> ConfigError | EngineDeadError:
        if self._timed_out is not None:
            return startup_timeout(process, self._init, self._timed_out, self._faults.startup_timeout)
        if starting and self._reason is None:
            return startup_failure(process, self._init, self._handshake.failure)
        phase = "stopping" if self.supervisor.stopping else "start-up" if starting else "running"
        facts = {"rank": self.rank, "incarnation": self._init.incarnation}
        error = process.death(phase, EngineDeadError, self._reason, **facts)
        told = self._told
        if told is not None and not error.remote_type:
            error.remote_type, error.remote_message, error.remote_traceback = told.type, told.message, told.traceback
        return error

    def _on_deadline(self, now: float) -> None:
        if self.waits:
            seconds = f"{self._faults.startup_timeout:g} s"
            self._wait_no_more(
                f"engine core rank {self.rank} was not started within {seconds}: {self.waits}", now, NoRoomError
            )
            return
        process = self.process
        assert process is not None  # there is no other deadline without one
        if self._killed_by is not None:
            process.end(0)  # the warden does not obey: bounded, and by other means
            self.exited(now)
        elif self._ready is None and self._handshake.failure is None and self.supervisor.restart_at is None:
            self._timed_out = self._handshake.state
            self.kill(now)
        else:
            self.kill(now)

    def _wait_no_more(self, reason: str, now: float, error: type[EngineStartupError] = EngineStartupError) -> None:
        self.waits = ""
        self._deadline = None
        first = self.supervisor.is_first
        self._died_unstarted(reason, now)
        if first and self.supervisor.state is EngineState.DEAD:
            incarnation = self.supervisor.incarnation
            self.failure = error(reason, rank=self.rank, incarnation=incarnation, phase="start-up")

    def _died_unstarted(self, reason: str, now: float) -> None:
        error = EngineDeadError(reason, rank=self.rank, incarnation=self.supervisor.incarnation, phase="start-up")
        self._death = EngineDeath.of(error)
        self.supervisor.died(now)
        self._tell_of_budget()


def _death_behind(failure: ConfigError | EngineDeadError) -> EngineDeadError:
    """The death itself: a `ConfigError` of start-up has it as its cause."""
    error = failure if isinstance(failure, EngineDeadError) else failure.__cause__
    assert isinstance(error, EngineDeadError)
    return error
