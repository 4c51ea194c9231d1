"""What all clients have in common, and what those with engine cores in other processes share: start and end."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from outboard.client.delivery import Delivery
from outboard.client.journal import Journal
from outboard.client.membership import Membership, OnStatus
from outboard.client.pending import CallFuture, PendingTable
from outboard.client.resources import Resources
from outboard.client.routing import Balanced, OneRank, Routing
from outboard.client.scaling import Scaling
from outboard.config import EngineConfig
from outboard.engine.calls import convert, return_type
from outboard.engine.core import EngineCore
from outboard.engine.loader import load_engine_class
from outboard.engines.registry import resolve_engine
from outboard.errors import ClientClosedError, ConfigError, EngineDeadError, UtilityError
from outboard.launch.group import EngineAddresses, launch_engines
from outboard.protocol.control import EngineStatus, identity_of
from outboard.protocol.messages import EngineInfo, SchedulerStats
from outboard.transport.sockets import make_context

__all__ = ["CoreEngine", "EngineCoreClient", "MPClient"]

logger = logging.getLogger("outboard.client")


class CoreEngine(msgspec.Struct, frozen=True):
    """One engine core, as its client knows it.

    Attributes:
        rank: its index in the group.
        incarnation: how often it had been started before.
        identity: its ZeroMQ identity, made of both.
        pid: its process id.
        info: what it reported of itself when it was ready.
        typed_utilities: methods whose results are converted by their annotations.
    """

    rank: int
    incarnation: int
    identity: bytes
    pid: int
    info: EngineInfo
    typed_utilities: frozenset[str] = frozenset()


class EngineCoreClient(ABC):
    """Drives an engine core; the kinds differ in where it runs and in how one waits for it.

    Attributes:
        config: the whole configuration.
        client_index: index of this front end.
        core_engines: the engine cores.
    """

    config: EngineConfig
    client_index: int
    core_engines: list[CoreEngine]
    _pending: PendingTable

    @staticmethod
    def make_client(
        multiprocess_mode: bool, asyncio_mode: bool, config: EngineConfig | str | type[Any]
    ) -> EngineCoreClient:
        """The kind of client that fits: `InprocClient`, `SyncMPClient` or `AsyncMPClient`.

        With several ranks, the last one is `DPLBAsyncMPClient` (internal balancing) or `DPAsyncMPClient` (external).

        Raises:
            ConfigError: asyncio without a process of its own for the engine: steps would block the event loop.
        """
        from outboard.client.data_parallel import client_class
        from outboard.client.inproc import InprocClient
        from outboard.client.sync_mp import SyncMPClient

        if multiprocess_mode and asyncio_mode:
            return client_class(config)(config)
        if multiprocess_mode:
            return SyncMPClient(config)
        if asyncio_mode:
            raise ConfigError("asyncio_mode needs multiprocess_mode: in one process, steps would block the event loop")
        return InprocClient(config)

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything. Idempotent and bounded.

        Args:
            timeout: seconds that the engine core gets to stop by itself; default `FaultConfig.shutdown_timeout`.
        """

    @abstractmethod
    def validate_alive(self) -> None:
        """Raises `EngineDeadError`, an instance of its own, if the engine core is gone."""

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine core reported of itself when it was ready."""
        return self.core_engines[0].info

    @property
    @abstractmethod
    def scheduler_stats(self) -> SchedulerStats:
        """The latest load that the engine core reported."""

    @property
    def utility_results(self) -> dict[int, CallFuture]:
        """Utility calls that wait: call id -> future."""
        return self._pending.utility_results

    @functools.cached_property
    def _engine_class(self) -> type[EngineCore] | None:
        """The engine's class, for the annotations of its utilities; None where it cannot be imported here."""
        try:
            return load_engine_class(resolve_engine(self.config.engine))
        except Exception:
            logger.info("the engine's class cannot be imported here: results keep their wire types", exc_info=True)
            return None

    def _check_rank(self, rank: int | str | None) -> int | None:
        """This rank, if there is one of that number."""
        ranks = [engine.rank for engine in self.core_engines]
        if rank is None:
            return None
        if not isinstance(rank, int) or rank not in ranks:
            raise ValueError(f"no engine core of rank {rank!r}; there is rank {', '.join(map(str, ranks))}")
        return rank

    def _typed(self, method: str, result: Any) -> Any:
        """A utility call's result as the type that the method's annotation names."""
        if method not in self.core_engines[0].typed_utilities or self._engine_class is None:
            return result
        try:
            return convert(result, return_type(getattr(self._engine_class, method)))
        except msgspec.ValidationError as error:
            raise UtilityError(f"the result of {method!r} is not what its annotation says: {error}") from error


class MPClient(EngineCoreClient):
    """A client whose engine cores run in processes of their own.

    Built from a config it starts them, and owns them: they end with it. Built from the addresses of an `EngineGroup`
    (`launch_engines`) it joins those that run, beside other front ends, and leaves them running. The constructor blocks
    until all are ready.

    Args:
        config: what to run; a bare engine name, reference or class stands for `EngineConfig(engine=...)`.
        addresses: of engine cores that run; in place of `config`.
        client_index: index of this front end; one that joins with the index of an earlier one takes its place.
        cancel_fd: a file descriptor that becomes readable when start-up is to be given up.

    Raises:
        ConfigError: the engine, an option or a model file is wrong; a subclass says which.
        EngineStartupError: an engine core died or failed before it was ready, or was too slow
            (`EngineStartupTimeout`); says how and why. Whatever had been started is gone.
        EngineDeadError: the launcher behind `addresses` is gone, or refuses this front end.
    """

    def __init__(
        self,
        config: EngineConfig | str | type[Any] | None = None,
        *,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
        cancel_fd: int | None = None,
    ) -> None:
        if (config is None) == (addresses is None):
            raise ConfigError("give either a config, whose engine cores are started, or the addresses of a group")
        self.client_index = client_index
        self._shutdown_lock = threading.Lock()
        self._closed = False
        with ExitStack() as undo:
            group = None
            if addresses is None:
                assert config is not None  # see above
                group = launch_engines(config, cancel_fd=cancel_fd)
                undo.callback(group.shutdown, 0)
                addresses = group.addresses
            context = make_context(addresses.keys)
            undo.callback(context.destroy, linger=0)
            self.config = addresses.config
            routing = self._make_routing()
            load = routing.table if isinstance(routing, Balanced) else None
            self._pending = PendingTable(_journal(self.config), load)
            self._resources = resources = Resources(context, group)
            self._membership = resources.membership = Membership(
                addresses,
                client_index,
                context,
                self._pending,
                self._make_delivery(),
                group is not None,
                resources.give_up,
                routing,
                self._only_rank,
            )
            self._membership.scaling = self._make_scaling(self._membership)
            undo.callback(self._membership.close_sockets)
            undo.callback(self._membership.stop_reading)
            self._membership.join()
            undo.pop_all()
        # The finalizer must not reach the client, or it would never run.
        self._finalizer = weakref.finalize(self, resources.abandon)

    def _make_routing(self) -> Routing:
        """Which rank gets a request. Called by the constructor, once the configuration is known."""
        parallel = self.config.parallel
        if parallel.elastic:
            raise ConfigError(
                f"{type(self).__name__} is for one rank, data_parallel_size is {parallel.data_parallel_size} and may "
                f"become {parallel.most_ranks}; use DPLBAsyncMPClient, or EngineCoreClient.make_client"
            )
        return OneRank()

    def _make_scaling(self, membership: Membership) -> Scaling | None:
        """What hears of changes of the number of ranks; None: nothing does. Called by the constructor."""
        return None

    @property
    def _only_rank(self) -> int | None:
        """The one rank that this client has to do with; None: all."""
        return None

    @abstractmethod
    def _make_delivery(self) -> Delivery:
        """Where messages go. Called by the constructor, with `_fail` to end the client by."""

    def _fail(self) -> Callable[[EngineDeadError], None]:
        """A function that ends the client, and does not hold it."""
        resources = self._resources

        def fail(cause: EngineDeadError) -> None:
            assert resources.membership is not None  # nothing is delivered before there is one
            resources.membership.fail(cause)

        return fail

    # --- state ---

    @property
    def core_engines(self) -> list[CoreEngine]:  # type: ignore[override]
        """The engine cores that get requests and have been ready, in their latest incarnation.

        A client of one rank has it until its end, also where that leaves.
        """
        membership = self._membership
        ranks = membership.roster.ranks or membership.roster.statuses
        return [
            CoreEngine(
                status.rank,
                status.incarnation,
                identity_of(status.rank, status.incarnation),
                status.pid or 0,
                status.info,
                frozenset(status.typed_utilities),
            )
            for rank, status in sorted(membership.roster.statuses.items())
            if status.info is not None and rank in ranks
        ]

    @property
    def engine_status(self) -> list[EngineStatus]:
        """The state of every engine core, by rank, as this client has taken note of it."""
        return [status for _, status in sorted(self._membership.roster.told.items())]

    @property
    def addresses(self) -> EngineAddresses:
        """What other front ends must know to join the same engine cores. It holds the session's secret."""
        return self._membership.addresses

    def engine_progress(self, rank: int = 0) -> tuple[int, float] | None:
        """Steps that an engine core has taken in its present incarnation, and seconds since its last sign of life.

        None where it does not run. Reads shared memory; asks nobody.
        """
        link = self._membership.links.get(rank)
        return None if link is None or link.stall is None or link.ending else link.stall.progress()

    def kill_engine(self, rank: int, reason: str) -> None:
        """Has an engine core killed; the restart policy decides what comes then. Returns at once.

        Args:
            reason: what the error of whatever it was at says.
        """
        self.validate_alive()
        self._membership.kill(rank, reason)

    def subscribe(self, on_status: OnStatus) -> Callable[[], None]:
        """Calls `on_status(status)` with every change of an engine core's state, and once more when the client ends.

        Call the result to end that. It is called where messages are received: on the event loop, or in the blocking
        client's thread. It must not raise.
        """
        return self._membership.subscribe(on_status)

    def validate_alive(self) -> None:
        if self._membership.failure is not None:
            raise self._membership.failure.copy()

    def check_health(self) -> None:
        """Raises what is wrong: nothing is raised only where all engine cores serve.

        Raises:
            EngineDeadError: an engine core is gone; `EngineRestartedError`: and is being started again.
            EngineStalledError: one makes no progress.
            ClientClosedError: the client was shut down.
        """
        self._membership.check()

    @property
    def scheduler_stats(self) -> SchedulerStats:
        loads = [link.receiver.scheduler_stats for link in self._membership.links.values()]
        if len(loads) == 1:
            return loads[0]
        return SchedulerStats(
            sum(load.waiting for load in loads),
            sum(load.running for load in loads),
            max((load.kv_cache_usage for load in loads), default=0.0),
        )

    @property
    def pending_messages(self) -> Sequence[tuple[Any, Any]]:
        """(tracker, frames) of messages whose buffers are still in use; the tracker is ZeroMQ's, or None."""
        messages: list[tuple[Any, Any]] = []
        for link in self._membership.links.values():
            messages += link.outbox.in_use
        return messages

    def stats(self) -> dict[str, Any]:
        """Counters: messages received, messages dropped by reason, requests and utility calls in flight, messages held
        in outboxes."""
        counters = self._membership.counters
        return {
            "received": counters.received,
            "dropped": dict(counters.dropped),
            "requests": len(self._pending.request_ids),
            "utility_calls": len(self._pending.utility_results),
            "outbox": sum(len(link.outbox) for link in self._membership.links.values()),
        }

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine cores, if they are this client's, and frees everything: processes, sockets, files.

        Idempotent; bounded by `timeout` and a moment to kill; callable from any thread, also after the event loop has
        closed. Whatever still waits ends with `ClientClosedError`. Blocks: on an event loop, prefer a thread
        (`await asyncio.to_thread(client.shutdown)`).

        Args:
            timeout: seconds that the engine cores get to stop by themselves before they are killed; default
                `FaultConfig.shutdown_timeout`. 0 kills them, also while another call waits for them to stop.
        """
        if os.getpid() != self._resources.creator:
            return  # a forked copy owns nothing
        # Before the lock: who holds it may be waiting for the loop that calls this.
        self._stop_reading()
        if timeout == 0 and self._resources.group is not None:
            self._resources.group.kill()  # before the lock, too: who holds it may have more patience
        with self._shutdown_lock:
            if self._closed:
                return
            # An interrupt in here, such as Ctrl-C, leaves all that is needed to call again.
            self._resources.close(self.config.faults.shutdown_timeout if timeout is None else timeout)
            self._finalizer.detach()
            self._closed = True

    @abstractmethod
    def _stop_reading(self) -> None:
        """Ends what waits, and takes the sockets out of use; called by `shutdown`, in its thread."""

    def _closed_error(self) -> ClientClosedError:
        status = next(iter(self._membership.roster.statuses.values()))
        return ClientClosedError("the client was shut down", rank=status.rank, pid=status.pid, phase="stopping")


def _journal(config: EngineConfig) -> Journal | None:
    """What is needed to move requests; nothing where a dead engine core stays dead."""
    faults = config.faults
    can_move = faults.restart.max_restarts > 0 or config.parallel.elastic
    return Journal(faults.in_flight, faults.max_resubmits) if can_move else None
