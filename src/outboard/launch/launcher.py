"""The launcher: a thread that owns engine cores, their wardens and the control channel.

It starts the processes, shakes hands, notices how they end, starts them again where the policy says so, introduces
front ends to engine cores, and tells every front end of every change. Being a thread it goes on while an event loop is
blocked; no output passes through it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from concurrent.futures import Future
from queue import SimpleQueue

from outboard.config import EngineConfig
from outboard.errors import ClientClosedError, EngineDeadError
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.desk import ControlDesk
from outboard.launch.frontends import FrontEnd
from outboard.launch.lockstep import LockstepGroup
from outboard.launch.nodes.desk import NodeDesk
from outboard.launch.rank import EngineRank
from outboard.launch.rank_process import RankStarter
from outboard.launch.scaler import ScaleOrder, Scaler
from outboard.launch.startup import InitMaker, StartCancelled
from outboard.launch.thread_signals import leave_signals_to_main
from outboard.protocol.control import EngineState
from outboard.protocol.nodes import RankProgress
from outboard.transport.curve import SessionKeys, refused_by
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ControlServer, ZmqContext

__all__ = ["Launcher"]

logger = logging.getLogger("outboard.launch")

# Nodes are told of the end; that may take so long to leave, milliseconds.
_LINGER_MS = 1000


class Launcher:
    """Runs in `thread`, which holds nothing of who started it. Public methods may be called from any thread.

    Args:
        config: what to run.
        inits: say what each rank is to run.
        context, session, control: become the launcher's own; it gives them back at its end.
        control_address: where `control` is bound.
        starter: starts the processes of ranks.
        nodes: those that start some; None: none does. Becomes the launcher's own.
        keys: of connections to other hosts; None: there are none.
        cancel_fd: a descriptor that becomes readable when start-up is to be given up.

    Attributes:
        desk: what it hears and says over the control channel.
        started: done once all engine cores are ready, or with what went wrong; all that was started is gone then.
        creator: id of the process that made it; a forked copy must not touch it.
    """

    def __init__(
        self,
        config: EngineConfig,
        inits: InitMaker,
        context: ZmqContext,
        session: SessionDirectory,
        control: ControlServer,
        control_address: str,
        starter: RankStarter,
        nodes: NodeDesk | None = None,
        keys: SessionKeys | None = None,
        cancel_fd: int | None = None,
    ) -> None:
        self._config = config
        self._context = context
        self._session = session
        self._control = control
        self._cancel_fd = cancel_fd
        self._coordinator = CoordinatorKeeper(session, control_address, config.network, keys)
        self._group = LockstepGroup(config, session, self._coordinator)
        self._inits = inits
        self._starter = starter
        self._nodes = nodes
        size = config.parallel.data_parallel_size
        self._ranks = [self._make_rank(number, size) for number in range(size)]
        self._group.add(self._ranks)
        self._orders: SimpleQueue[ScaleOrder] = SimpleQueue()
        self._stop_by: float | None = None
        self._stop_seen: float | None = None
        self._abandoned = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()  # guards closing it; not taken by `abandon`, after which nobody calls
        self.desk = ControlDesk(control, session.token, self._ranks, config.faults, self._coordinator)
        self._scaler = Scaler(
            config, self._ranks, self._group, self._coordinator, self.desk, self._make_joining, self._is_started
        )
        if nodes is not None:
            nodes.on_progress = self._on_progress
        self._ended = threading.Event()
        self.started: Future[None] = Future()
        self.creator = os.getpid()
        self.thread = threading.Thread(target=self._run, name="outboard-launcher", daemon=True)

    def __del__(self) -> None:
        # Where nobody joins, since it was abandoned: now that nobody refers to it, nobody is about to write.
        if getattr(self, "_wake_fd", -1) >= 0:
            os.close(self._wake_fd)

    # --- for other threads ---

    def stop(self, timeout: float) -> None:
        """Asks all engine cores to end, within `timeout` seconds, and the thread with them. Does not wait."""
        stop_by = time.monotonic() + timeout
        self._stop_by = stop_by if self._stop_by is None else min(self._stop_by, stop_by)
        with self._wake_lock:
            self._wake()

    @property
    def coordinator(self) -> dict[str, int | None] | None:
        """The coordinator's pid, None between two, and its incarnation; None: there is none."""
        keeper = self._coordinator
        if keeper.incarnation < 0:
            return None
        ready, process = keeper.place is not None, keeper.process
        return {"incarnation": keeper.incarnation, "pid": process.engine_pid if ready and process is not None else None}

    @property
    def refused(self) -> dict[str, int]:
        """How many connections of strangers were turned away, by reason."""
        counts = Counter(refused_by(self._context))
        counts.update(self._coordinator.refused)
        if self._nodes is not None:
            counts.update(self._nodes.refused)
        return dict(+counts)

    def scale(self, order: ScaleOrder) -> None:
        """Has the number of ranks changed. Does not wait."""
        self._orders.put(order)
        with self._wake_lock:
            self._wake()

    def join(self, timeout: float) -> None:
        """Waits for the thread's end, `timeout` seconds at most."""
        # Not by the thread's own `join`: one that Ctrl-C interrupts takes the thread for ended (CPython 3.11, 3.12).
        if self._ended.wait(timeout):
            self.thread.join(1.0)
            self._close_wake()

    def abandon(self) -> None:
        """Has all ended and released in the background. For finalizers: takes no lock and never blocks."""
        if os.getpid() != self.creator:
            return
        self._abandoned = True
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.release()
        coordinator = self._coordinator.process
        if coordinator is not None:
            coordinator.release()
        self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _close_wake(self) -> None:
        # Not closed while another thread may be about to write to it: its number might belong to somebody else by then.
        with self._wake_lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)

    # --- the thread ---

    def _run(self) -> None:
        leave_signals_to_main()  # a warden unblocks them for what it starts
        try:
            now = time.monotonic()
            for rank in self._ranks:
                rank.start(now)
            if self._config.parallel.needs_coordinator:
                self._coordinator.start(now)
            while not self._over():
                self._turn()
        except BaseException as error:
            logger.debug("the launcher ends", exc_info=True)
            if not self.started.done():
                self._end_processes()
                self.started.set_exception(error)
            else:
                logger.exception("the launcher failed; its engine cores are ended")
                reason = f"the launcher failed, and its engine cores have been ended: {type(error).__name__}: {error}"
                self.desk.publish_end(reason)
        finally:
            self._end_processes()
            self._release()
            self._ended.set()

    def _over(self) -> bool:
        """Whether the thread has nothing left to do."""
        if self._abandoned:
            return True
        running = any(rank.process is not None for rank in self._ranks)
        if self._coordinator.wanted and self._stop_seen is not None and not running:
            self._coordinator.stop(time.monotonic())  # behind the ranks
        running = running or self._coordinator.process is not None
        if not self.started.done():
            return self._look_at_start(running)
        return self._stop_seen is not None and not running

    def _look_at_start(self, running: bool) -> bool:
        """While starting: notes success, or ends what there is once something failed. Returns whether all is over."""
        failure: BaseException | None = next((rank.failure for rank in self._ranks if rank.failure is not None), None)
        if self._stop_seen is not None and failure is None:
            failure = ClientClosedError("shut down while it was starting", phase="start-up")
        if failure is None and self._cancel_fd == -1:
            failure = StartCancelled()
        if failure is None:
            failure = self._coordinator.failure
        if failure is None:
            coordinated = not self._coordinator.wanted or self._coordinator.place is not None
            if coordinated and all(rank.supervisor.state is EngineState.READY for rank in self._ranks):
                self.started.set_result(None)
            return False
        if running:
            for rank in self._ranks:
                rank.supervisor.stop()
                rank.kill(time.monotonic())
            self._coordinator.stop(time.monotonic())
            return False
        self._release()  # before anybody hears of the failure
        self.started.set_exception(failure)
        return True

    def _turn(self) -> None:
        coordinator = self._coordinator
        watched: dict[int, EngineRank | FrontEnd | CoordinatorKeeper | None] = {self._wake_fd: None}
        watched |= {rank.process.sentinel: rank for rank in self._ranks if rank.process is not None}
        watched |= {one.pidfd: one for one in self.desk.front_ends if one.pidfd >= 0}
        if coordinator.process is not None:
            watched[coordinator.process.sentinel] = coordinator
        starting = not self.started.done() and self._cancel_fd is not None and self._cancel_fd >= 0
        cancel_fd = self._cancel_fd if starting else None
        if cancel_fd is not None:
            watched[cancel_fd] = None
        nodes = self._nodes
        if nodes is not None:
            watched[nodes.fd] = None
        if self._starter.fd >= 0:
            watched[self._starter.fd] = None
        may_begin = self._group.may_begin
        dues = [*(rank.due(may_begin) for rank in self._ranks), coordinator.due, self._scaler.due]
        if nodes is not None:
            dues.append(nodes.due)
        now = time.monotonic()
        due = min((due for due in dues if due is not None), default=None)
        timeout = max(0.0, due - now) if due is not None else None
        if nodes is not None and nodes.pending():
            timeout = 0.0
        ready = self._control.wait(list(watched), timeout)
        if self._abandoned:
            return  # what ends now ends by our own hand
        now = time.monotonic()
        self.desk.take_all(now)
        if nodes is not None:
            nodes.take_all(now)
            nodes.look(now)
        self._starter.look([rank.rank for rank in self._ranks if rank.supervisor.alive or rank.process is not None])
        self._group.look(now)
        if cancel_fd is not None and cancel_fd in ready:
            self._cancel_fd = -1
        if self._wake_fd in ready:
            self._on_wake(now)
        for fd in ready:
            what = watched[fd]
            if isinstance(what, EngineRank):
                self._on_exit(what, now)
            elif isinstance(what, FrontEnd):
                self._session.remove_sockets_of(what.pid)
                self.desk.detach(what)
            elif isinstance(what, CoordinatorKeeper):
                what.exited(now)
        coordinator.tick(now)
        may_begin = self._group.may_begin
        for rank in self._ranks:
            before = rank.supervisor.state, rank.supervisor.incarnation
            rank.tick(now, may_begin)
            if before != (rank.supervisor.state, rank.supervisor.incarnation):
                self.desk.publish(rank)
                if rank.process is None:  # it ended, or could not be started
                    self._end_group(rank, now)
        self._scaler.look(now)

    def _on_wake(self, now: float) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        while not self._orders.empty():
            self._scaler.order(self._orders.get_nowait())
        stop_by = self._stop_by
        if stop_by is not None and stop_by != self._stop_seen:
            self._stop_seen = stop_by
            self._group.stopping = True
            self._scaler.stop()
            for rank in self._ranks:
                before = rank.supervisor.state
                rank.stop(now, stop_by - now)
                if before is not rank.supervisor.state:  # it was between two incarnations
                    self.desk.publish(rank)

    def _on_exit(self, rank: EngineRank, now: float) -> None:
        rank.exited(now)
        status = self.desk.publish(rank)
        if self.started.done():
            self._end_group(rank, now)
        if self.started.done() and status.death is not None and status.state is not EngineState.STOPPED:
            # Once, however many requests fail of it: whoever made them gets an error each.
            level = logging.ERROR if status.state is EngineState.DEAD else logging.WARNING
            error = EngineDeadError(**status.death.facts())
            if status.state is not EngineState.DEAD:
                error.reason += " It is being started again."
            logger.log(level, "%s", error)

    def _end_group(self, rank: EngineRank, now: float) -> None:
        for other in self._group.end_with(rank, now):
            self.desk.publish(other)

    def _on_progress(self, progress: RankProgress) -> None:
        if progress.rank < len(self._ranks):
            self.desk.publish_progress(progress)

    def _is_started(self) -> bool:
        return self.started.done() and self._stop_seen is None

    def _make_joining(self, number: int, size: int, incarnation: int) -> EngineRank:
        return self._make_rank(number, size, incarnation, joining=True)

    def _make_rank(self, number: int, size: int, incarnation: int = 0, *, joining: bool = False) -> EngineRank:
        init = self._inits.init(number, size, incarnation, joining=joining)
        env = self._config.parallel.of_rank(number).env
        facts = self._group.facts_at_start
        return EngineRank(init, self._session.token, self._starter, self._config.faults, env, facts)

    # --- the end ---

    def _end_processes(self) -> None:
        for rank in self._ranks:
            process, rank.process = rank.process, None
            if process is not None:
                process.abandon()
        self._coordinator.abandon()

    def _release(self) -> None:
        """Gives everything back. Idempotent."""
        if self._nodes is not None:
            self._nodes.close(_LINGER_MS)
        self._starter.close()
        self.desk.close()
        self._context.term()
        self._session.remove()
