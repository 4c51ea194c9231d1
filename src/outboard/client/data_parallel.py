"""The asyncio clients of several engine cores: `DPLBAsyncMPClient` chooses between them, `DPAsyncMPClient` has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from outboard.client.async_mp import AsyncMPClient
from outboard.client.membership import Membership
from outboard.client.routing import Balanced, OneRank, Routing
from outboard.client.scaling import OnProgress, Scaling
from outboard.config import EngineConfig
from outboard.dp.balancing import BalancingPolicy, make_policy
from outboard.dp.load import LoadTable
from outboard.errors import ConfigError, UtilityError
from outboard.launch.group import EngineAddresses
from outboard.transport.sockets import ZmqSocket

# Seconds; as in the configuration.
_LONGEST = 1_000_000

__all__ = ["DPAsyncMPClient", "DPLBAsyncMPClient", "client_class"]


class _CoordinatedClient(AsyncMPClient):
    """What a client of several ranks knows of their coordinator, where there is one, and of changes of their number."""

    def _make_scaling(self, membership: Membership) -> Scaling:
        sync_timeout = self.config.parallel.dp_sync_timeout
        scaling = Scaling(self.client_index, membership.tell, membership.counters, membership.is_linked, sync_timeout)
        self._delivery.on_hook_done = scaling.on_hook_done
        return scaling

    @property
    def current_wave(self) -> int:
        """The wave that a lockstep group is in, or the next where it rests; as last published."""
        return self._membership.coordination.waves.current_wave

    @property
    def engines_running(self) -> bool:
        """Whether a lockstep group steps; as last published."""
        return self._membership.coordination.waves.engines_running

    @property
    def first_req_send_socket(self) -> ZmqSocket | None:
        """By which the coordinator hears of the first request to a group that rests; None: there is no coordinator."""
        return self._membership.coordination.socket


class DPAsyncMPClient(_CoordinatedClient):
    """A front end of one rank of several: whoever sends requests to front ends balances between them.

    Its own rank, and no other, gets its requests, aborts and utility calls; the death of another is nothing to it.
    Otherwise as `AsyncMPClient`.

    Args:
        config, addresses, cancel_fd: as `AsyncMPClient`.
        client_index: index of this front end.
        data_parallel_rank: its rank; default: `client_index`.
    """

    def __init__(
        self,
        config: EngineConfig | str | type[Any] | None = None,
        *,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
        cancel_fd: int | None = None,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.data_parallel_rank = client_index if data_parallel_rank is None else data_parallel_rank
        super().__init__(config, addresses=addresses, client_index=client_index, cancel_fd=cancel_fd)

    def _make_routing(self) -> Routing:
        return OneRank()

    @property
    def _only_rank(self) -> int | None:
        return self.data_parallel_rank


class DPLBAsyncMPClient(_CoordinatedClient):
    """Drives several engine cores: chooses one for each request, and sends utility calls to all.

    A request with `data_parallel_rank` goes to that rank. Where a rank dies, others go on; its requests move, resume or
    end as `FaultConfig.in_flight` says, and only when no rank is left, and none will come back, the client has ended.

    Args:
        config, addresses, client_index, cancel_fd: as `AsyncMPClient`.
        policy: an object that chooses ranks, in place of the one that `ParallelConfig.policy` names.

    Attributes:
        policy: what chooses.
    """

    def __init__(
        self,
        config: EngineConfig | str | type[Any] | None = None,
        *,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
        cancel_fd: int | None = None,
        policy: BalancingPolicy | None = None,
    ) -> None:
        self._wanted_policy = policy
        super().__init__(config, addresses=addresses, client_index=client_index, cancel_fd=cancel_fd)

    def _make_routing(self) -> Routing:
        parallel = self.config.parallel
        self.policy = make_policy(self._wanted_policy or parallel.policy)
        client_count = max(parallel.client_count, self.client_index + 1)
        self._table = LoadTable(client_index=self.client_index, client_count=client_count)
        return Balanced(self._table, self.policy)

    @property
    def lb_engines(self) -> dict[int, int]:
        """Own requests in flight, by rank."""
        return {rank: self._table.in_flight(rank) for rank in self._membership.roster.ranks}

    @property
    def data_parallel_size(self) -> int:
        """How many ranks get requests, as this client has taken note of it."""
        return self._membership.roster.members

    async def scale(
        self,
        new_size: int,
        *,
        timeout: float | None = None,
        drain: float = 60.0,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Changes the number of ranks while they serve; all requests go on.

        Ranks that come are started beside the others, and get requests once all is ready. Ranks that leave, those with
        the highest numbers, get no more, end those that they have, and stop. Whatever goes wrong before the new size
        counts leaves things as they were; afterwards it goes on.

        Cancelling takes it back, where that is still possible, in the background; `scale` called meanwhile waits for
        that.

        Args:
            new_size: how many ranks there are to be; with as many as there are, it returns at once.
            timeout: seconds for new ranks to get ready, and again for the rest; default `FaultConfig.startup_timeout`.
            drain: seconds that ranks which leave get to end their requests; what is left then moves, resumes or ends
                with `EngineRemovedError` as `FaultConfig.in_flight` says.
            on_progress: called on the loop with every step of it.

        Raises:
            ConfigError: the size is out of `ParallelConfig`'s bounds.
            ScaleInProgressError: another change is under way.
            ScaleRolledBackError: it failed; there are as many ranks as before.
            NotificationError: it is done, or taken back, but an engine core's notification made no sense.
            ScaleError: another reason, such as an `eep_process_engine_core_notification` that raised.
            UnsupportedError: the engine has no `reinitialize`, or the ranks were not meant to be scaled.
            EngineDeadError: the client has ended.
        """
        scaling, seconds = self._begin_scaling(new_size, timeout, drain)
        await scaling.scale(new_size, seconds, drain, on_progress)

    async def prepare_elastic_ep(
        self, new_data_parallel_size: int, *, timeout: float | None = None, drain: float = 60.0
    ) -> None:
        """The first half of `scale`: returns once new ranks are ready; nothing has changed for requests.

        `commit_elastic_ep` or `abort_elastic_ep` has to follow. Args, raises, cancelling: as `scale`.
        """
        scaling, seconds = self._begin_scaling(new_data_parallel_size, timeout, drain)
        await scaling.prepare(new_data_parallel_size, seconds, drain)

    async def commit_elastic_ep(self) -> None:
        """The second half of `scale`. Raises, cancelling: as there; `ScaleError` where nothing is prepared."""
        await self._scaling().commit()

    async def abort_elastic_ep(self) -> None:
        """Takes back what was prepared; returns when all is as before, at once where that has happened already.

        Cancelling ends the waiting alone.

        Raises:
            ScaleError: nothing is prepared.
            EngineDeadError: the client has ended.
        """
        await self._scaling().abort()

    def subscribe_scale(self, on_progress: OnProgress) -> Callable[[], None]:
        """Calls `on_progress` with every step of any front end's change of size. Call the result to end that."""
        return self._scaling().subscribe(on_progress)

    def _begin_scaling(self, new_size: int, timeout: float | None, drain: float) -> tuple[Scaling, float]:
        if not isinstance(new_size, int) or isinstance(new_size, bool) or new_size.bit_length() > 31:
            raise ConfigError(f"the number of ranks must be an int of 32 bits, not {new_size!r}")
        seconds = self.config.faults.startup_timeout if timeout is None else timeout
        if not _is_number(seconds) or not 0 < seconds <= _LONGEST:
            raise ConfigError(f"timeout must be above 0 and at most {_LONGEST} s, not {seconds!r}")
        if not _is_number(drain) or not 0 <= drain <= _LONGEST:
            raise ConfigError(f"drain must be at least 0 and at most {_LONGEST} s, not {drain!r}")
        return self._scaling(), seconds

    def _scaling(self) -> Scaling:
        self._ensure_output_queue_task()
        self.validate_alive()
        assert self._membership.scaling is not None  # see the constructor
        return self._membership.scaling

    async def call_utility_async(
        self,
        method: str,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        rank: int | str | None = None,
    ) -> Any:
        """Calls a utility method of the engine cores: all, because most change their state; the first one's result.

        Args:
            rank: one rank only; "least_loaded": the one with the fewest requests; None: all that serve.
            method, args, kwargs, timeout: as `AsyncMPClient.call_utility_async`.

        Raises: as there; with several ranks the error of the first that failed, once all have answered.
        """
        if isinstance(rank, int):
            return await super().call_utility_async(method, *args, kwargs=kwargs, timeout=timeout, rank=rank)
        if rank == "least_loaded":
            least = min(self._table.ranks, key=self._table.in_flight, default=None)
            return await super().call_utility_async(method, *args, kwargs=kwargs, timeout=timeout, rank=least)
        if rank is not None:
            raise ValueError(f"rank must be a number, 'least_loaded' or None, not {rank!r}")
        return (await self.call_utility_all_async(method, *args, kwargs=kwargs, timeout=timeout))[0]

    async def call_utility_all_async(
        self, method: str, *args: Any, kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Calls a utility method of every engine core that serves; their results, by rank.

        Raises: as `call_utility_async`.
        """
        self._ensure_output_queue_task()
        self.validate_alive()
        ranks: Sequence[int | None] = self._table.ranks or [None]  # None: raises why there is none
        one = super().call_utility_async
        calls = [one(method, *args, kwargs=kwargs, timeout=timeout, rank=rank) for rank in ranks]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def call_utility_consensus_async(
        self, method: str, *args: Any, kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """As `call_utility_all_async`; the one result that all gave.

        Raises:
            UtilityError: they differ; the message names what each gave.
        """
        results = await self.call_utility_all_async(method, *args, kwargs=kwargs, timeout=timeout)
        if any(result != results[0] for result in results):
            raise UtilityError(f"the ranks do not agree on {method!r}: {results!r}")
        return results[0]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def client_class(config: EngineConfig | str | type[Any]) -> type[AsyncMPClient]:
    """The asyncio client that fits a configuration."""
    if not isinstance(config, EngineConfig) or not config.parallel.elastic:
        return AsyncMPClient
    return DPAsyncMPClient if config.parallel.balancing == "external" else DPLBAsyncMPClient
