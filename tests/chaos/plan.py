"""What a schedule does, drawn from its seed before anything runs. The same seed, the same plan, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from outboard import EngineConfig, FaultConfig, RestartPolicy, TransportConfig

__all__ = ["STRIKES", "CallPlan", "Plan", "RequestPlan", "Strike", "calls", "draw", "requests"]

Side = Literal["llm", "mp", "sync"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        deaths: how many engine cores it may end.
        chaos: whether it needs `ChaosEngine`.
        group: whether it needs engine cores that are nobody's own.
    """

    deaths: int = 0
    chaos: bool = False
    group: bool = False


STRIKES: dict[str, Kind] = {
    "kill the engine core": Kind(1),
    "kill it as it comes back": Kind(2),
    "kill the warden": Kind(1),
    "stop for a moment": Kind(),
    "stop for too long": Kind(),  # a death where stalls are restarted: see `deaths_of`
    "die in a step": Kind(1, chaos=True),
    "die in a utility": Kind(1, chaos=True),
    "die in start-up": Kind(3, chaos=True),
    "start slowly": Kind(1, chaos=True),
    "hang in a step for a moment": Kind(chaos=True),
    "hang in a step for too long": Kind(chaos=True),
    "hang in a utility": Kind(chaos=True),
    "results that cannot be sent": Kind(chaos=True),
    "flood of results": Kind(chaos=True),
    "large arrays": Kind(chaos=True),
    "no shared memory here": Kind(chaos=True),
    "no shared memory there": Kind(chaos=True),
    "junk on the output socket": Kind(),
    "junk on the input socket": Kind(),
    "junk on the control socket": Kind(),
    "no ZeroMQ on a socket": Kind(),
    "block the loop": Kind(),
    "pause, abort": Kind(),
    "pause, wait": Kind(),
    "pause, keep": Kind(),
    "cancel a start": Kind(),
    "a front end comes and goes": Kind(group=True),
    "a front end process comes and goes": Kind(group=True),
    "a front end process is killed": Kind(group=True),
    "a front end process is replaced": Kind(group=True),
}

# How it ends. Those in the second line do so in the middle of the traffic.
_ENDS = {
    "shutdown": 6, "drain": 3, "dropped": 2, "hang in shutdown": 2, "die in shutdown": 2, "closed loop": 2,
    "shutdown in the middle": 3, "kill in the middle": 2, "two shutdowns": 2, "drain in the middle": 3,
    "drain cut short": 2, "reading cancelled": 1, "loop closed in the middle": 2, "group first": 3,
}  # fmt: skip
MIDDLE = frozenset(list(_ENDS)[6:])

_STYLES: dict[Side, dict[str, int]] = {
    "llm": {
        "whole": 8, "slow": 3, "cancel": 4, "timeout": 2, "break": 2, "aclose": 2, "abort": 3, "never read": 1,
        "submit": 3, "submit and abort": 2, "abort inside": 1, "submit and raise": 1, "several": 2, "stop string": 1,
        "duplicate": 1, "refused": 1, "refused there": 1,
    },
    "mp": {"whole": 8, "abort": 4, "duplicate": 1, "refused": 1, "refused there": 1},
    "sync": {"whole": 8, "abort": 4, "duplicate": 1, "refused": 1, "refused there": 1},
}  # fmt: skip


# Styles whose readers give up for sure, at some time or at some token.
_ENDED_BY_TIME = ("cancel", "abort", "submit and abort")
_ENDED_BY_TOKEN = ("break", "aclose", "abort inside", "submit and raise")


@dataclass(frozen=True)
class Strike:
    """A fault: what, how long after the last, and all that is left open by that."""

    kind: str
    delay: float
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestPlan:
    """One request.

    Attributes:
        style: how its outputs are read, and whether that is given up.
        count: tokens asked for.
        at: the token, and `after`: the seconds, at which a reader gives up.
        pause: seconds between two reads of a slow reader.
        output_kind: of `SamplingParams`.
        text: whether to detokenize.
        rest: whether to read what is left after giving up.
        endless: whether it would go on for ever, were it not given up.
    """

    style: str
    count: int
    at: int
    after: float
    pause: float
    output_kind: str
    text: bool
    rest: bool
    endless: bool = False


@dataclass(frozen=True)
class CallPlan:
    """One utility call: what, and what comes before it."""

    kind: str
    delay: float
    after: float


@dataclass(frozen=True)
class Plan:
    """A schedule.

    Attributes:
        side: which client makes the traffic.
        uvloop: on which event loop.
        group: whether the engine cores are launched apart, so that there may be several front ends.
        hook: whether the client has a coroutine function as hook.
        engine: "mock", "echo" or "chaos".
        config: of the engine cores.
        workers, callers: how many tasks make requests and calls, one after the other, until the strikes are over.
        strikes: the faults, in order.
        calm: seconds of traffic after the last.
        end: how it ends.
    """

    seed: int
    side: Side
    uvloop: bool
    group: bool
    hook: str
    engine: str
    config: EngineConfig
    workers: int
    callers: int
    strikes: tuple[Strike, ...]
    calm: float
    end: str

    @property
    def budget(self) -> int:
        """How many restarts there are."""
        return self.config.faults.restart.max_restarts

    def deaths_of(self, kind: str) -> int:
        """How many engine cores a strike of this kind may end."""
        if kind in ("stop for too long", "hang in a step for too long", "hang in a utility"):
            return int(self.config.faults.stall_action == "restart")
        return STRIKES[kind].deaths


def draw(seed: int) -> Plan:
    """The plan of a seed. Successive seeds begin with each kind of fault in turn."""
    random = Random(seed)
    first = list(STRIKES)[seed % len(STRIKES)]
    end = _weighted(random, _ENDS)
    group = STRIKES[first].group or end == "group first" or random.random() < 0.15
    side: Side = random.choices(["llm", "mp", "sync"], [7, 2, 2])[0]  # type: ignore[assignment]
    if end in ("drain", "drain in the middle", "drain cut short"):
        side = "llm"
    if end in ("closed loop", "loop closed in the middle", "reading cancelled") and side == "sync":
        end = "shutdown in the middle"
    if group and end == "dropped":
        end = "shutdown"
    engine = "chaos" if STRIKES[first].chaos else random.choices(["mock", "echo", "chaos"], [3, 2, 4])[0]
    if end in ("hang in shutdown", "die in shutdown"):
        engine = "chaos"
    possible = [
        kind for kind, needs in STRIKES.items() if (engine == "chaos" or not needs.chaos) and (group or not needs.group)
    ]
    kinds = [first, *random.choices(possible, k=random.choice([0, 1, 1, 2]))]
    config = _config(
        random, engine, end, zmq_for_sure=first in ("junk on the output socket", "junk on the input socket")
    )
    return Plan(
        seed=seed,
        side=side,
        uvloop=random.random() < 0.4,
        group=group,
        hook=random.choice(["", "plain", "coroutine"]) if side == "mp" else "",
        engine=engine,
        config=config,
        workers=random.randint(2, 10),
        callers=random.randint(0, 3),
        strikes=tuple(
            Strike(kind, round(random.uniform(0.0, 0.3), 3), _params(random, config.faults.stall_timeout))
            for kind in kinds
        ),
        calm=round(random.uniform(0.0, 0.3), 3),
        end=end,
    )


def requests(plan: Plan, worker: int) -> Iterator[RequestPlan]:
    """What a worker asks for, one after the other."""
    random = Random(f"{plan.seed} {worker}")
    while True:
        count = random.choice([1, 2, 5, 20, 60, 150, 300])
        style = _weighted(random, _STYLES[plan.side])
        output_kind = random.choice(["delta", "delta", "cumulative", "final_only"])
        given_up = style in _ENDED_BY_TIME or (style in _ENDED_BY_TOKEN and output_kind != "final_only")
        yield RequestPlan(
            style=style,
            count=count,
            at=random.randint(1, count),
            after=round(random.uniform(0.0, 0.2), 4),
            pause=random.choice([0.001, 0.01, 0.05]),
            output_kind=output_kind,
            text=random.random() < 0.3,
            rest=random.random() < 0.5,
            endless=random.random() < 0.5 and given_up and plan.engine != "echo",
        )


def calls(plan: Plan, caller: int) -> Iterator[CallPlan]:
    """What a caller asks for, one after the other."""
    random = Random(f"{plan.seed} caller {caller}")
    kinds = {"quick": 5, "unknown": 1, "unsendable": 1, "everybody": 1}
    if plan.engine == "chaos":
        kinds |= {"raises": 2, "never": 2, "cancelled": 2, "blocks": 1, "arrays": 2}
    while True:
        yield CallPlan(
            _weighted(random, kinds), round(random.uniform(0.0, 0.05), 4), round(random.uniform(0.01, 0.2), 4)
        )


def _weighted(random: Random, weights: dict[str, int]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]


def _params(random: Random, stall_timeout: float) -> dict[str, Any]:
    """What strikes need; all of it for each, so that a new kind does not change the draws of others."""
    return {
        "way": random.choice(["exception", "sys_exit", "_exit", "sigkill", "sigsegv", "abort"]),
        "hang": random.choice(["sleep", "spin", "gil"]),
        "short": round(random.uniform(0.02, 0.3), 3),
        "long": round(stall_timeout + random.uniform(0.6, 1.0), 3),
        "count": random.choice([1, 3, 20]),
        "size": random.choice([1_000, 100_000, 600_000, 1_500_000]),
        "times": random.choice([1, 1, 2]),
        "kill too": random.random() < 0.3,
        "socket": random.choice(["out-", "in-", "control"]),
        "seed": random.randrange(1 << 30),
    }


def _config(random: Random, engine: str, end: str, zmq_for_sure: bool) -> EngineConfig:
    sockets = random.choice(["unix", "zmq"])
    options: dict[str, Any] = {
        "step_ms": random.choice([0.2, 1.0, 1.0, 3.0]),
        "max_num_seqs": random.choice([2, 256, 256]),
    }
    if engine != "echo":
        options["tokens_per_step"] = random.choice([1, 1, 3])
    ways = {"way": random.choice(["exception", "sys_exit", "_exit", "sigkill", "sigsegv", "abort"])}
    slow = {"slow_start": round(random.uniform(0.1, 0.3), 2)} if random.random() < 0.2 else {}
    late = random.choice([0, 0, 20])
    if engine == "chaos":
        options |= slow | {"late": late}
        if end == "hang in shutdown":
            options |= {"hang_in": "shutdown", "hang_seconds": 30.0}
        elif end == "die in shutdown":
            options |= {"die_in": "shutdown", **ways}
    restarts = random.choice([0, 0, 1, 2, 4, 6, 6])
    return EngineConfig(
        engine="chaos.engines:ChaosEngine" if engine == "chaos" else engine,
        options=options,
        faults=FaultConfig(
            startup_timeout=30.0,
            shutdown_timeout=1.0 if end == "hang in shutdown" else 5.0,
            stall_timeout=round(random.uniform(1.0, 1.3), 2),
            stall_action=random.choice(["report", "restart"]),
            restart=RestartPolicy.on_failure(restarts, backoff=random.choice([0.01, 0.1]), max_backoff=0.2),
            in_flight=random.choice(["fail", "resubmit", "resume"]),
            max_resubmits=random.choice([1, 3, 10]),
            max_queued=random.choice([0, 3, 1024, 1024, 1024]),
        ),
        transport=TransportConfig(
            # Who connects to the other kind of socket finds nobody listening any more.
            sockets="zmq" if zmq_for_sure else sockets,  # type: ignore[arg-type]
            high_water_mark=random.choice([2, 1000, 1000]),
            inline_bytes=random.choice([1024, 64 << 10]),
            shared_memory_bytes=random.choice([1 << 16, 1 << 20]),
            shared_memory_limit=random.choice([0, 1 << 20, 1 << 28]),
            stream_buffer_bytes=random.choice([1 << 20, 16 << 20, 1 << 30]),
        ),
    )
