"""Configuration: small frozen structs, one a component. A component gets its own part, never the whole."""

from __future__ import annotations

import ipaddress
import math
from typing import Any, Literal, get_args

import msgspec

from outboard.errors import ConfigError

__all__ = [
    "EngineConfig",
    "FaultConfig",
    "NetworkConfig",
    "ParallelConfig",
    "RankOptions",
    "RayPlacement",
    "RestartPolicy",
    "Sockets",
    "TransportConfig",
]

# What carries requests and outputs between a client and an engine core.
Sockets = Literal["unix", "zmq"]

# Seconds; what the system's timers count in milliseconds of 32 bits ends soon after.
_LONGEST = 1_000_000
# What one host can be asked for; a slip of the keyboard should not start a million processes.
_MOST_RANKS = 256
# Seconds; ZeroMQ tells the other end its patience in tenths, which that counts in milliseconds of 16 bits.
_SHORTEST_PATIENCE = 0.1
_LONGEST_PATIENCE = 60.0


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether an engine core that died is started again. Use `never()` or `on_failure(...)`.

    Attributes:
        max_restarts: how many restarts are allowed within `window`; 0: none at all.
        window: seconds.
        backoff: seconds before the first restart; doubles with each one in the window.
        max_backoff: seconds; the longest pause.
    """

    max_restarts: int = 0
    window: float = 300.0
    backoff: float = 0.1
    max_backoff: float = 10.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0, not {self.max_restarts!r}")
        for name in ("window", "backoff", "max_backoff"):
            least = 0 if name != "window" else 1e-3
            if not least <= getattr(self, name) <= _LONGEST:
                raise ConfigError(f"{name} must be at least {least:g} and at most {_LONGEST} s")

    @classmethod
    def never(cls) -> RestartPolicy:
        """An engine core that died stays dead; vLLM's behaviour, and the default."""
        return cls()

    @classmethod
    def on_failure(
        cls, max_restarts: int = 3, window: float = 300.0, backoff: float = 0.1, max_backoff: float = 10.0
    ) -> RestartPolicy:
        """An engine core that died is started again, up to `max_restarts` times in any `window` seconds."""
        return cls(max_restarts=max_restarts, window=window, backoff=backoff, max_backoff=max_backoff)


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to wait for an engine core before it is given up, and what comes then. All times in seconds.

    Attributes:
        startup_timeout: from the start of the process until READY. Loading large weights takes minutes, hence 600.
        shutdown_timeout: from the request to stop until the process is killed.
        stall_timeout: how long an engine core may give no sign of progress, while something waits for it, before it is
            `STALLED`. A step that takes longer should call `EngineCore.progress`.
        stall_action: "report" it, or "restart": kill it, and let the restart policy decide.
        restart: whether an engine core that died is started again.
        in_flight: what becomes of the requests of an engine core that is started again: "fail" ends them with
            `EngineRestartedError`; "resubmit" sends those anew that had no output yet, and ends the others; "resume"
            also goes on with the others, from their prompt and tokens so far.
        max_resubmits: how often one request is sent anew; a request that kills every engine that takes it must end.
        max_queued: how many requests may wait for an engine core that is being started again; more are refused with
            `EngineRestartingError`.
    """

    startup_timeout: float = 600.0
    shutdown_timeout: float = 10.0
    stall_timeout: float = 60.0
    stall_action: Literal["report", "restart"] = "report"
    restart: RestartPolicy = RestartPolicy()
    in_flight: Literal["fail", "resubmit", "resume"] = "fail"
    max_resubmits: int = 1
    max_queued: int = 1024

    def __post_init__(self) -> None:
        for name in ("startup_timeout", "shutdown_timeout", "stall_timeout"):
            if not 0 < getattr(self, name) <= _LONGEST:
                raise ConfigError(f"{name} must be above 0 and at most {_LONGEST} s, not {getattr(self, name)!r}")
        for name in ("max_resubmits", "max_queued"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)!r}")
        for name, choices in (("stall_action", ("report", "restart")), ("in_flight", ("fail", "resubmit", "resume"))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the sockets between a client and its engine cores.

    Attributes:
        sockets: what carries requests and outputs: "unix", plain Unix sockets, or "zmq".
        high_water_mark: messages that the sockets hold for each direction before the sender keeps them itself.
            ZeroMQ's own default. A Unix socket counts bytes: it is asked for 4 KiB a message, up to 8 MiB, of which the
            system may allow less (`net.core.wmem_max`; by default some 100 messages of 256 requests).
        max_message_bytes: a peer that sends a larger message is disconnected.
        inline_bytes: arrays up to this size travel inside the message body; larger ones as frames of their own,
            which no sender copies from 64 KiB on (below that ZeroMQ copies anyway).
        shared_memory_bytes: arrays larger than this travel through shared memory, where there is room for them.
        shared_memory_limit: most bytes of shared memory for each engine core and each direction; memory is taken as it
            is needed, and kept for reuse. 0 turns shared memory off.
        stream_buffer_bytes: results that one stream holds for a reader that is behind; past it that stream ends with
            `SlowReaderError`. Tokens do not count: they merge.
    """

    sockets: Sockets = "unix"
    high_water_mark: int = 1000
    max_message_bytes: int = 4 << 30
    inline_bytes: int = 64 << 10
    shared_memory_bytes: int = 1 << 20
    shared_memory_limit: int = 1 << 30
    stream_buffer_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if self.sockets not in get_args(Sockets):
            raise ConfigError(f"sockets must be one of {', '.join(get_args(Sockets))}, not {self.sockets!r}")
        for name in self.__struct_fields__[1:]:
            least = 0 if name == "shared_memory_limit" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)!r}")


class RankOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank has of its own.

    Attributes:
        options: keyword arguments of the engine's constructor, over those of all ranks; such as a device.
        env: environment variables of its process, such as CUDA_VISIBLE_DEVICES.
        cpus: the CPUs that its process may use; empty: all, or a share of them where the engine says that it computes
            on them (`EngineCore.cpu_bound`).
    """

    options: dict[str, Any] = {}
    env: dict[str, str] = {}
    cpus: list[int] = []


class RayPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each rank takes of a Ray cluster, and how to get there. Each rank has a placement group of its own.

    Attributes:
        bundles: resources that a rank takes, all on one node, such as `[{"CPU": 4, "GPU": 1}]`; "CPU", "GPU", "memory"
            (bytes) or whatever else nodes of the cluster have. The engine core gets those of the first, by
            CUDA_VISIBLE_DEVICES too; the others are held for what its engine starts.
        labels: that a node must have, as label selectors of Ray, such as `{"accelerator": "in(L4, A10)"}`.
        strategy: "SPREAD": ranks on as many nodes as there are, if they have room; "PACK": wherever Ray puts them.
        address: of the cluster, as for `ray.init`: "auto" for one that must run already. "": the one that this process
            is connected to, or that RAY_ADDRESS names, or that runs on this host; where there is none, one of this host
            alone, which ends with the engine cores.
        runtime_env: Ray's environment of the ranks' actors, such as `{"pip": [...]}` or `{"working_dir": "."}`: one way
            to have Outboard, and an engine of one's own, on the nodes. Directories of this host only where the
            connection to Ray is made here: a process that calls `ray.init` itself gives them there.
        timeout: seconds that a start, or a change of the number of ranks, waits for room. A rank that is started again
            waits for ever.
    """

    bundles: list[dict[str, float]] = msgspec.field(default_factory=lambda: [{"CPU": 1.0}])
    labels: dict[str, str] = {}
    strategy: Literal["SPREAD", "PACK"] = "SPREAD"
    address: str = ""
    runtime_env: dict[str, Any] = {}
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.bundles or not all(self.bundles):
            raise ConfigError("bundles must name what a rank takes, such as [{'CPU': 1, 'GPU': 1}]; none may be empty")
        for bundle in self.bundles:
            for name, amount in bundle.items():
                if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 < amount < math.inf:
                    raise ConfigError(f"bundles: of {name!r} a rank must take more than 0, not {amount!r}")
        if self.strategy not in ("SPREAD", "PACK"):
            raise ConfigError(f"strategy must be 'SPREAD' or 'PACK', not {self.strategy!r}")
        if not 0 < self.timeout <= _LONGEST:
            raise ConfigError(f"timeout must be above 0 and at most {_LONGEST} s, not {self.timeout!r}")


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many engine cores there are, and who chooses between them.

    Attributes:
        data_parallel_size: ranks; each is a process with the whole engine.
        balancing: "internal": each front end's client chooses a rank for every request; "external": each front end has
            one rank, and whoever sends to front ends chooses.
        policy: with internal balancing, how: "least_loaded", "round_robin", "power_of_two" or "prefix_affine".
        client_count: front ends that share the ranks; see `launch_engines`.
        min_size, max_size: how few and how many ranks `scale` may be asked for. With a `max_size` above 1 even a single
            rank can be scaled up; without one a single rank is driven by the plain client, which cannot.
        rank_options: what ranks have of their own, by rank; ranks beyond its end have nothing.
        dp_sync_interval: of an engine whose ranks step together: steps from one agreement on whether to go on to the
            next. Fewer cost more time, more let idle ranks step longer in vain. The default is vLLM's.
        dp_sync_timeout: how long a rank waits for the others to take part in such an agreement, seconds; one that does
            not ends the engine cores.
        backend: who starts the processes of ranks: "local": the launcher, here or on nodes that join; "ray": a Ray
            cluster, all of them; needs `outboard[ray]` here and on its nodes.
        placement: with Ray, what ranks take, and where.
    """

    data_parallel_size: int = 1
    balancing: Literal["internal", "external"] = "internal"
    policy: str = "least_loaded"
    client_count: int = 1
    min_size: int = 1
    max_size: int | None = None
    rank_options: list[RankOptions] = []
    dp_sync_interval: int = 32
    dp_sync_timeout: float = 30.0
    backend: Literal["local", "ray"] = "local"
    placement: RayPlacement | None = None

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "client_count"):
            if not 1 <= getattr(self, name) <= _MOST_RANKS:
                raise ConfigError(f"{name} must be at least 1 and at most {_MOST_RANKS}, not {getattr(self, name)!r}")
        if self.dp_sync_interval < 1:
            raise ConfigError(f"dp_sync_interval must be at least 1, not {self.dp_sync_interval!r}")
        if not 0 < self.dp_sync_timeout <= _LONGEST:
            raise ConfigError(f"dp_sync_timeout must be above 0 and at most {_LONGEST} s, not {self.dp_sync_timeout!r}")
        if self.balancing not in ("internal", "external"):
            raise ConfigError(f"balancing must be 'internal' or 'external', not {self.balancing!r}")
        if self.backend not in ("local", "ray"):
            raise ConfigError(f"backend must be 'local' or 'ray', not {self.backend!r}")
        if self.placement is not None and self.backend != "ray":
            raise ConfigError("placement is for ranks that Ray places: add backend='ray'")
        most = self.most_ranks
        if not 1 <= self.min_size <= self.data_parallel_size <= most <= _MOST_RANKS:
            raise ConfigError(
                f"1 <= min_size <= data_parallel_size <= max_size <= {_MOST_RANKS} must hold, not "
                f"{self.min_size!r}, {self.data_parallel_size!r}, {self.max_size!r}"
            )
        if len(self.rank_options) > (most if self.max_size is not None else self.data_parallel_size):
            raise ConfigError(
                f"rank_options has {len(self.rank_options)} entries, data_parallel_size is {self.data_parallel_size}"
            )

    @property
    def most_ranks(self) -> int:
        """How many ranks there may come to be."""
        return _MOST_RANKS if self.max_size is None else self.max_size

    @property
    def elastic(self) -> bool:
        """Whether there may be several ranks, now or later."""
        return self.data_parallel_size > 1 or (self.max_size or 1) > 1

    @property
    def needs_coordinator(self) -> bool:
        """Whether ranks and front ends are too many to know of each other's load; lockstep ranks need one anyway."""
        return self.data_parallel_size > 1 and self.client_count > 1

    def of_rank(self, rank: int) -> RankOptions:
        """What this rank has of its own."""
        return self.rank_options[rank] if rank < len(self.rank_options) else RankOptions()


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the head listens for engine cores on other machines, and how long those may be silent.

    All that it listens for is encrypted and authenticated; who has not the session's keys gets nothing.

    Attributes:
        listen: the name of a network interface ("eth0"), an address of this host, IPv4 or IPv6, or a host name that
            resolves to one. A wildcard ("0.0.0.0", "::") only together with `advertise`.
        advertise: address or host name that others connect to, where it is not the one bound, as behind NAT or a
            service of Kubernetes. The ports stay the same.
        port: where nodes join; 0: any free one.
        ports: "first-last", the ports of all other sockets; None: any free ones.
        token_file: path of a file that holds the secret shared by all machines, of mode 0600 or stricter; None: a
            random one, which whoever starts the nodes must bring to them.
        heartbeat_interval: seconds between two signs of life on a connection on which nothing else travels.
        patience: seconds that a node may be silent before the head gives up its engine cores, and that the head may be
            before the node ends them, from 0.1 to 60. A connection on which nothing comes is closed after twice that
            and a second: after a cut the system waits for about as long again before it sends anew. To send an array
            must not take longer than that.
        local_ranks: how many ranks, the first ones, run on the head's own host. The others wait for a node. With
            `ParallelConfig(backend="ray")` there are none: Ray places them all, on the head's host too.
    """

    listen: str
    advertise: str | None = None
    port: int = 5570
    ports: str | None = None
    token_file: str | None = None
    heartbeat_interval: float = 1.0
    patience: float = 10.0
    local_ranks: int = 1

    def __post_init__(self) -> None:
        if not self.listen or "/" in self.listen:
            raise ConfigError(
                f"listen must be a network interface, an address or a host name, without a port, not {self.listen!r}"
            )
        if self.advertise is None:
            if is_wildcard(self.listen):
                raise ConfigError(f"listen is {self.listen!r}, every address there is: say which one to advertise")
        elif not self.advertise or "/" in self.advertise or is_wildcard(self.advertise):
            raise ConfigError(f"advertise must be an address or a host name, without a port, not {self.advertise!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be at least 0 and at most 65535, not {self.port!r}")
        _ = self.port_range
        if not _SHORTEST_PATIENCE <= self.patience <= _LONGEST_PATIENCE:
            raise ConfigError(
                f"patience must be at least {_SHORTEST_PATIENCE:g} and at most {_LONGEST_PATIENCE:g} s, "
                f"not {self.patience!r}"
            )
        if not 0.01 <= self.heartbeat_interval < self.patience:
            raise ConfigError(
                f"heartbeat_interval must be at least 0.01 s and less than patience, not {self.heartbeat_interval!r}"
            )
        if not 0 <= self.local_ranks <= _MOST_RANKS:
            raise ConfigError(f"local_ranks must be at least 0 and at most {_MOST_RANKS}, not {self.local_ranks!r}")

    @property
    def port_range(self) -> range | None:
        """The ports of `ports`."""
        if self.ports is None:
            return None
        first, dash, last = self.ports.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 65535:
            return range(int(first), int(last) + 1)
        raise ConfigError(f"ports must be 'first-last', ports from 1 to 65535, not {self.ports!r}")


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run, and how.

    Attributes:
        engine: the name of an engine that comes along ("openvino", "echo", "mock"), "module:Class", "path.py:Class",
            or an `EngineCore` class that can be imported from its module.
        options: keyword arguments of the engine's constructor; any msgpack values.
        parallel: how many engine cores, and who chooses between them.
        faults: time limits, and what to do when an engine core dies or hangs.
        transport: limits of the sockets.
        network: where to listen for engine cores on other machines; None: all is on this host, and nothing listens.
    """

    engine: str | type[Any]
    options: dict[str, Any] = {}
    parallel: ParallelConfig = ParallelConfig()
    faults: FaultConfig = FaultConfig()
    transport: TransportConfig = TransportConfig()
    network: NetworkConfig | None = None
