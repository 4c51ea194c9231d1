"""What a client knows of its engine cores, by the control channel, and its links with them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from outboard._version import __version__
from outboard.client.coordination import Coordination
from outboard.client.delivery import Delivery
from outboard.client.driver import Driver
from outboard.client.engine_listener import EngineListener
from outboard.client.launcher_channel import FromLauncher, LauncherChannel
from outboard.client.link import Link
from outboard.client.moves import Moves
from outboard.client.pending import PendingTable
from outboard.client.progress_watch import ProgressWatch
from outboard.client.receiver import Counters
from outboard.client.roster import Roster
from outboard.client.routing import Routing
from outboard.client.scaling import Scaling
from outboard.client.states import GONE, SERVING, gone, removed, restarting
from outboard.client.traffic import Traffic
from outboard.errors import (
    ClientClosedError,
    ConfigError,
    EngineDeadError,
    EngineStartupError,
)
from outboard.launch.group import EngineAddresses
from outboard.protocol.control import (
    Acknowledge,
    Attached,
    CoordinatorAt,
    EngineProgress,
    EngineState,
    EngineStatus,
    Join,
    KillEngine,
    Leave,
    Welcome,
)
from outboard.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreRequestType,
    ErrorReport,
    LeaveRank,
)
from outboard.protocol.scaling import (
    Members,
    ScaleProgress,
    ScaleRefused,
    ScaleState,
)
from outboard.transport.sockets import ZmqContext

__all__ = ["Membership", "OnStatus"]

logger = logging.getLogger("outboard.client")

OnStatus = Callable[[EngineStatus], None]

# A launcher answers at once; this bounds what happens where it is stopped, or so busy that it is of no use.
_JOIN_TIMEOUT = 30.0
# An engine core that is attached has connected; its part of the connection is there in a moment.
_CONNECT_TIMEOUT = 1.0
# How long the news of a death may take that happened while nothing was read.
_NEWS_TIMEOUT = 1.0
# How long it may take to tell the launcher that this front end goes after all, in milliseconds.
_LINGER_MS = 500


class Membership:
    """Follows the states of the engine cores, attaches to those that are ready, and ends what a dead one leaves.

    Belongs to the thread of its client, and holds no reference to the client.

    Args:
        addresses: of the launcher.
        client_index: of the client.
        context: for all sockets.
        pending: what waits.
        delivery: who gets the messages.
        owner: whether the engine cores are this client's own, so that it may have one killed.
        give_up: called when the client is of no more use, unless it was shut down.
        routing: which rank gets a request.
        only_rank: the one rank that this client has to do with; None: all.

    Attributes:
        addresses: of the launcher and all that it keeps.
        roster: the engine cores that it knows.
        traffic: what is asked of the engine cores.
        scaling: hears of changes of the number of ranks; None: nobody does.
        watch: looks whether those that something waits for make progress.
        failure: the error that ended everything; None while all is well.
        links: by rank; those that can be used, and those that end.
        counters: of messages.
        coordination: with other ranks and front ends.
    """

    def __init__(
        self,
        addresses: EngineAddresses,
        client_index: int,
        context: ZmqContext,
        pending: PendingTable,
        delivery: Delivery,
        owner: bool,
        give_up: Callable[[], None],
        routing: Routing,
        only_rank: int | None = None,
    ) -> None:
        self._routing = routing
        self._only_rank = only_rank
        self.roster = Roster(only_rank)
        config = addresses.config
        self.addresses = addresses
        self._config = config
        self._client_index = client_index
        self._context = context
        self._pending = pending
        self._delivery = delivery
        self._listener = EngineListener(self, delivery, owner)
        self._give_up = give_up
        self._driver: Driver | None = None
        self._slot = -1
        self.scaling: Scaling | None = None
        self.failure: EngineDeadError | None = None
        self.links: dict[int, Link] = {}
        self._subscribers: list[OnStatus] = []
        self.counters = Counters()
        self._launcher = LauncherChannel(
            context, addresses, not owner, self.counters, self._on_control, self._on_launcher_gone
        )
        self._moves = Moves(pending, delivery, client_index, config)
        self.watch = ProgressWatch(config.faults.stall_timeout, pending, self.links, self._launcher.tell)
        self.traffic = Traffic(self, pending, self._moves, routing)
        self.coordination = Coordination(
            context, addresses.session_token, client_index, routing.published, self.counters
        )

    # --- joining ---

    def join(self) -> None:
        """Joins, and attaches to all engine cores that are ready. Blocks; nothing is read on an event loop yet.

        Raises:
            ConfigError: the one rank that this client has to do with does not exist.
            EngineDeadError: the launcher refuses, does not answer, or is gone.
        """
        self._launcher.tell(
            Join(PROTOCOL_VERSION, __version__, self.addresses.session_token, self._client_index, os.getpid())
        )
        # An engine core that is just being started again is waited for as at the first start.
        deadline = time.monotonic() + _JOIN_TIMEOUT
        startup_deadline = deadline + self._config.faults.startup_timeout
        while self.failure is None and not self._joined:
            left = (startup_deadline if self._slot >= 0 else deadline) - time.monotonic()
            if left <= 0:
                raise EngineStartupError(
                    f"the launcher (pid {self.addresses.launcher_pid}) did not let this front end join in time; is it "
                    "stopped?",
                    phase="start-up",
                )
            self._launcher.wait(left)
            while self._launcher.drain():
                pass
        if self.failure is not None:
            raise self.failure.copy()
        # Or an engine core that is stopped at once would look idle: it would not have been sent what is asked of it.
        deadline = time.monotonic() + _CONNECT_TIMEOUT
        for link in self.links.values():
            link.inputs.wait_for_peer(deadline - time.monotonic())
        if not self.roster.ranks:
            self.leave()
            self._launcher.close(_LINGER_MS)
            raise ConfigError(
                f"data_parallel_rank {self._only_rank} does not exist: data_parallel_size is {self.roster.members}"
            )

    @property
    def _joined(self) -> bool:
        coming = [rank for rank in self.roster.ranks if self.roster.statuses[rank].state not in GONE]
        return self._slot >= 0 and all(rank in self.links and self.links[rank].attached for rank in coming)

    def attach(self, driver: Driver) -> None:
        """Reads on, in `driver`'s thread. What has happened since `join` is taken note of before this returns."""
        deadline = time.monotonic() + _NEWS_TIMEOUT
        while any(link.is_dead and not link.ending for link in self.links.values()) and self.failure is None:
            if time.monotonic() > deadline:
                break
            try:
                self._launcher.wait(deadline - time.monotonic())
            except EngineDeadError as error:
                self._on_launcher_gone(error)
            self._launcher.drain()
        while self.failure is None and self._launcher.drain():
            pass
        self._driver = driver
        if self.failure is not None:
            return
        self._launcher.attach(driver)
        self.watch.attach(driver)
        self.coordination.attach(driver)
        if self.scaling is not None:
            self.scaling.attach(driver)
        for link in self.links.values():
            if link.attached:
                link.read_on(driver)
        self._take_leave()

    # --- what the client asks for ---

    def subscribe(self, on_status: OnStatus) -> Callable[[], None]:
        """Calls `on_status` with every change of an engine core's state, and once more when the client ends.

        Call the result to end that.
        """
        self._subscribers.append(on_status)
        return lambda: self._subscribers.remove(on_status) if on_status in self._subscribers else None

    def is_linked(self, rank: int) -> bool:
        """Whether this rank serves, and this client has to do with it."""
        link = self.links.get(rank)
        return link is not None and not link.ending

    def check(self) -> None:
        """Raises what is wrong, where no engine core serves."""
        if self.failure is not None:
            raise self.failure.copy()
        self.roster.check()

    def _set_available(self) -> None:
        links = self.links.items()
        self._routing.set_available([rank for rank, link in links if link.usable and rank < self.roster.members])

    # --- the end ---

    def fail(self, cause: EngineDeadError) -> None:
        """Ends everything that waits, now and for ever after. Only the first cause counts."""
        if self.failure is not None:
            return
        status = next(iter(self.roster.statuses.values()), None)
        if cause.pid is None and status is not None:
            cause.rank, cause.incarnation, cause.pid = status.rank, status.incarnation, status.pid
        self.failure = cause
        if not isinstance(cause, ClientClosedError):
            self.stop_reading()
            self._give_up()
        if self._delivery.can_tell():
            self._pending.fail_all(cause)
            self._delivery.end(cause)
            if self.scaling is not None:
                self.scaling.fail(cause)
            self.roster.told = dict(self.roster.statuses)
            for status in self.roster.told.values():
                self._notify(status)

    def stop_reading(self) -> None:
        """Takes everything off the loop, and forgets what was not sent. Idempotent."""
        self.watch.stop()
        self.coordination.detach()
        if self.scaling is not None:
            self.scaling.stop()
        self._launcher.detach()
        for link in self.links.values():
            link.close()

    def tell(self, message: Any) -> None:
        """Sends a message to the launcher."""
        if not self._launcher.closed:
            self._launcher.tell(message)

    def leave(self) -> None:
        """Tells the launcher that this front end goes."""
        if not self._launcher.closed:
            self._launcher.tell(Leave())

    def close_sockets(self, linger_ms: int = 0) -> None:
        """Closes all sockets, which nobody may be using. Idempotent."""
        for link in self.links.values():
            link.close_socket()
        self.coordination.close()
        self._launcher.close(linger_ms)

    # --- the control channel ---

    def _on_control(self, message: FromLauncher) -> None:
        if self.failure is not None:
            return
        if isinstance(message, EngineStatus):
            self._on_status(message)
        elif isinstance(message, EngineProgress):
            link = self.links.get(message.rank)
            if link is not None and link.stall is not None:
                link.stall.note(message)
        elif isinstance(message, Attached):
            self._on_attached(message)
        elif isinstance(message, CoordinatorAt):
            self.coordination.follow(message)
        elif isinstance(message, Members):
            self._on_members(message)
        elif isinstance(message, ScaleProgress | ScaleRefused):
            if isinstance(message, ScaleProgress):
                self._on_progress(message)
            if self.scaling is not None:
                self.scaling.on_message(message)
        elif isinstance(message, Welcome):
            self._slot = message.slot
            self.roster.members = message.members if message.members >= 0 else len(message.engines)
            # The gone ones last: where the first is gone, it is not the only one.
            for status in sorted(message.engines, key=lambda status: status.state in GONE):
                self._on_status(status)
        else:
            self.fail(EngineDeadError(f"the launcher refuses this front end: {message.reason}"))

    def _on_status(self, status: EngineStatus) -> None:
        if not self.roster.concerns(status.rank):
            self._launcher.tell(Acknowledge(status.version))
            return
        known = self.roster.statuses.get(status.rank)
        if known is not None and status.version <= known.version:
            return
        link = self.links.get(status.rank)
        if link is not None and link.ending and known is not None and known.state in GONE:
            link.end_now()  # it was scaled away, and comes again already
            if self.failure is not None:
                return
            link = None
        self.roster.statuses[status.rank] = status
        self._launcher.tell(Acknowledge(status.version))
        if link is not None and not (status.state in SERVING and status.incarnation == link.status.incarnation):
            if status.state in SERVING:  # already the next one: there is no time to wait for what is left of the last
                link.end(lambda: self._on_link_over(link))
                link.end_now()
            elif not link.ending:
                link.end(lambda: self._on_link_over(link))
            self._set_available()
        elif link is None and status.state in GONE:
            self._on_rank_gone(status)
        if self.failure is None and status.state in SERVING and status.rank not in self.links:
            self._attach_to(status)
        if status.state not in SERVING or self._serves(status.rank):
            self._notify(status)  # else once it can be used

    def _serves(self, rank: int) -> bool:
        """Whether this rank has requests of this client, or can get them."""
        link = self.links.get(rank)
        return link is not None and link.usable and self.roster.gets_requests(rank)

    def _notify(self, status: EngineStatus) -> None:
        if status.rank in self.roster.statuses:  # else it has been scaled away, which is the last that is told of it
            self.roster.told[status.rank] = status
        for on_status in list(self._subscribers):
            on_status(status)

    def _attach_to(self, status: EngineStatus) -> None:
        link = Link(
            status,
            self._slot,
            self._client_index,
            self._config,
            self._context,
            self.addresses.directory,
            self._pending,
            self._listener,
            self.counters,
            self._call_later,
        )
        self.links[status.rank] = link
        self._launcher.tell(link.invitation())

    def _on_attached(self, message: Attached) -> None:
        link = self.links.get(message.rank)
        if link is None or link.epoch != message.epoch or link.attached:
            return
        if (
            message.refused and message.rank >= self.roster.members
        ):  # whoever changes the size finds that it is not attached
            logger.warning("engine core rank %d, which is to join, refuses: %s", message.rank, message.refused)
            link.close()
            link.close_socket()
            del self.links[message.rank]
            return
        if message.refused:
            self.fail(EngineDeadError(f"engine core rank {message.rank} refuses this front end: {message.refused}"))
            return
        if not link.on_attached():
            return
        if self._driver is not None:
            link.read_on(self._driver)
        self._take_leave()
        self._set_available()
        self._moves.send_waiting(self.traffic.route)
        if self._serves(message.rank):
            self._notify(self.roster.statuses[message.rank])

    def _on_members(self, message: Members) -> None:
        """Ranks that are no members any more get nothing from now on; what they have, they end, or it moves."""
        before = self.roster.set_members(message.size)
        self._set_available()
        self._take_leave()
        for rank in sorted(self.roster.statuses):
            if rank >= message.size:
                self._moves.end_unreachable(rank, removed(self.roster.statuses[rank]))
                if self.roster.statuses[rank].state in GONE and rank not in self.links:
                    self.roster.forget(rank)
        self._launcher.tell(Acknowledge(message.version))
        self._moves.send_waiting(self.traffic.route)
        for rank in range(before, message.size):
            if self._serves(rank):
                self._notify(self.roster.statuses[rank])

    def _on_progress(self, progress: ScaleProgress) -> None:
        """Who has joined meanwhile learns by this which ranks leave."""
        if progress.new_size < progress.old_size and progress.state in (ScaleState.COMMITTING, ScaleState.DRAINING):
            self.roster.leaving.update(range(progress.new_size, progress.old_size))
            self._take_leave()

    def _take_leave(self) -> None:
        """Says LEAVE, once and behind all requests, to ranks that are members no more."""
        if self._driver is None:
            return  # nothing is sent before there is one
        for rank, link in self.links.items():
            if rank >= self.roster.members and rank in self.roster.leaving and link.usable and not link.left:
                link.left = True
                link.sender.send(EngineCoreRequestType.LEAVE, LeaveRank(link.epoch))

    # --- deaths ---

    def _on_link_over(self, link: Link) -> None:
        """All that a dead engine core had sent has been taken."""
        link.close()
        link.close_socket()
        status = self.roster.statuses[link.status.rank]
        if self.links.get(status.rank) is link:
            del self.links[status.rank]
        self.watch.forget(status.rank)
        asked = status.state is EngineState.STOPPED and (status.death is None or status.death.exit_code == 0)
        if self.scaling is not None and not asked:
            self.scaling.on_death(status.rank)
        if self.failure is not None:
            return
        self._set_available()
        self._routing.forget(status.rank, link.status.incarnation)
        if status.state in GONE:
            self._on_rank_gone(status)
        else:
            self._moves.after_death(status.rank, restarting(status))
            if status.rank >= self.roster.members:
                self._moves.end_unreachable(status.rank, removed(status))
            self._moves.send_waiting(self.traffic.route)

    def _on_rank_gone(self, status: EngineStatus) -> None:
        is_member = status.rank < self.roster.members
        if self.roster.all_gone:
            self.fail(gone(status) if is_member else removed(status))
            return
        if not is_member:
            self._on_removed(status)
            return
        self._moves.after_death(status.rank, restarting(status))
        self._moves.end_unreachable(status.rank, gone(status))
        self._moves.send_waiting(self.traffic.route)

    def _on_removed(self, status: EngineStatus) -> None:
        """Forgets a rank that has been scaled away; it may come again, as another incarnation."""
        cause = removed(status)
        self._moves.after_death(status.rank, cause, at_fault=False)
        self._moves.end_unreachable(status.rank, cause)
        self._moves.send_waiting(self.traffic.route)
        self.roster.forget(status.rank)

    def _on_launcher_gone(self, error: EngineDeadError) -> None:
        for link in list(self.links.values()):
            link.end_now()  # a last look at what has come
        self.fail(error)

    # --- to have one killed ---

    def kill(self, rank: int, reason: str) -> None:
        """Has the present incarnation of an engine core killed."""
        self._kill(self.roster.statuses[rank], reason)

    def kill_later(self, delay: float, status: EngineStatus, reason: str, report: ErrorReport) -> None:
        """Has this incarnation of an engine core killed if it lives in `delay` seconds still."""
        if self._driver is not None:
            self._driver.call_later(delay, self._kill, status, reason, report)

    def _kill(self, which: EngineStatus, reason: str, report: ErrorReport | None = None) -> None:
        status = self.roster.statuses.get(which.rank)
        if self.failure is not None or self._launcher.closed or status is None:
            return
        if status.incarnation == which.incarnation:
            self._launcher.tell(KillEngine(which.rank, which.incarnation, reason, report))

    def _call_later(self, delay: float, function: Callable[[], None]) -> None:
        assert self._driver is not None  # nothing is sent before there is one
        self._driver.call_later(delay, function)
