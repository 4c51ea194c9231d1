"""What decides about ranks in a Ray cluster, without Ray; and that Ray is only needed where it is wanted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from outboard import ConfigError, EngineConfig, EngineStartupError, NoRoomError, ParallelConfig, RayPlacement
from outboard.cli.network import head_network
from outboard.cli.ray import ray_placement
from outboard.config import NetworkConfig
from outboard.launch.group import launch_engines
from outboard.launch.head import with_network
from outboard.launch.nodes.node import Node
from outboard.launch.placement import Room
from outboard.launch.rank_process import NoRoom, Unplaceable
from outboard.launch.ray.facts import RayNode, actor_options, choose_node, describe, why_lost, why_pending
from outboard.launch.ray.news import PlaceLost, PlaceMade, PlaceNews, PlacePending
from outboard.launch.ray.starter import RayStarter
from outboard.transport.node_server import node_context


@dataclass
class Places:
    """What `RayPlaces` is asked for, and the news that it has."""

    fd: int = -1
    asked: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    queue: list[PlaceNews] = field(default_factory=list)
    closed: int = 0

    def ask(self, number: int) -> None:
        self.asked.append(number)

    def start(self, number: int) -> None:
        self.started.append(number)

    def drop(self, number: int) -> None:
        self.dropped.append(number)

    def news(self) -> list[PlaceNews]:
        news, self.queue = self.queue, []
        return news

    def close(self) -> None:
        self.closed += 1


@dataclass
class Nodes:
    """A desk where nodes join."""

    there: dict[str, Room] = field(default_factory=dict)
    lost: list[tuple[str, str, str]] = field(default_factory=list)

    def join(self, name: str) -> None:
        self.there[name] = Room(f"id of {name}", name, 1, 0)

    def rooms(self) -> list[Room]:
        return list(self.there.values())

    def start(self, node_id: str, rank: int, incarnation: int, env: Mapping[str, str]) -> Any:
        return node_id, rank, incarnation

    def lose(self, name: str, what: str, word: str) -> None:
        if self.there.pop(name, None) is not None:
            self.lost.append((name, what, word))


class Case:
    """A starter between fakes."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.now = 0.0
        self.places, self.nodes = Places(), Nodes()
        placement = RayPlacement(bundles=[{"CPU": 1, "GPU": 2}], timeout=timeout)
        self.starter = RayStarter(placement, self.places, self.nodes, lambda: self.now)

    def start(self, rank: int, incarnation: int = 0) -> Any:
        """A process, or why there is none."""
        try:
            return self.starter.start(rank, incarnation, {})
        except NoRoom as reason:
            return str(reason)

    def hear(self, *news: PlaceNews, ranks: range = range(8)) -> None:
        self.places.queue += news
        self.starter.look(ranks)


def joined(*ranks: int) -> Case:
    """With these ranks started, in places of the same numbers."""
    case = Case()
    for rank in ranks:
        case.start(rank)
    case.hear(*(PlaceMade(rank, f"n{rank}") for rank in ranks))
    for rank in ranks:
        case.start(rank)
        case.nodes.join(f"n{rank}")
        assert case.start(rank) == (f"id of n{rank}", rank, 0)
    return case


# --- a rank's way to its place ---------------------------------------------------------------------------------------


def test_a_rank_waits_for_room_then_for_its_node_and_starts_there() -> None:
    case = Case()
    assert case.start(0) == ("no room: rank 0 waits for CPU 1, GPU 2 in the Ray cluster: Ray has not placed it yet")
    case.hear(PlacePending(0, "no node has as much free"))
    assert str(case.start(0)).endswith("in the Ray cluster: no node has as much free")
    assert case.places.started == []
    case.hear(PlaceMade(0, "n0"))
    assert case.start(0) == "rank 0 waits for its node n0, which Ray starts"
    case.start(0)
    assert (case.places.asked, case.places.started) == ([0], [0])
    case.nodes.join("another")
    assert "waits for its node" in case.start(0)
    case.nodes.join("n0")
    assert case.start(0) == ("id of n0", 0, 0)


def test_no_node_is_started_before_all_new_ranks_have_room() -> None:
    case = Case()
    case.start(0), case.start(1)
    case.hear(PlaceMade(0, "n0"), PlacePending(1, "it is full"))
    assert case.start(0).startswith("rank 0 has room, and waits for the others. no room: rank 1 waits for ")
    assert case.places.started == []
    case.hear(PlaceMade(1, "n1"))
    case.start(0), case.start(1)
    assert case.places.started == [0, 1]


def test_a_rank_that_is_started_again_waits_for_nobody() -> None:
    case = joined(0)
    case.start(1)  # is new, and has no room
    case.hear(PlaceLost(0, "has died", "actor"))
    assert case.nodes.lost == [("n0", "has died", "actor")]
    case.start(0, 1)
    case.hear(PlaceMade(2, "n2"))
    case.start(0, 1)
    assert case.places.started == [0, 2]


def test_room_that_does_not_come_in_time_is_a_typed_error() -> None:
    case = Case(timeout=5)
    case.start(0)
    case.hear(PlacePending(0, "it is full"))
    case.now = 5.0
    with pytest.raises(
        Unplaceable, match=r"no room in the Ray cluster within 5 s for CPU 1, GPU 2: it is full"
    ) as info:
        case.starter.start(0, 0, {})
    assert info.value.error is NoRoomError
    assert case.places.dropped == [0]


def test_a_rank_that_is_started_again_waits_for_room_for_ever() -> None:
    case = joined(0)
    case.hear(PlaceLost(0, "has died", "actor"))
    case.start(0, 1)
    case.now = 1e6
    assert case.start(0, 1).startswith("no room: rank 0 waits for ")


def test_a_new_rank_whose_place_is_lost_before_its_node_joins_has_failed() -> None:
    case = Case()
    case.start(0)
    case.hear(PlaceMade(0, "n0"), PlaceLost(0, "cannot run Outboard", "actor"))
    with pytest.raises(Unplaceable, match="its node n0 in the Ray cluster cannot run Outboard") as info:
        case.starter.start(0, 0, {})
    assert info.value.error is EngineStartupError


def test_an_old_rank_asks_again_after_longer_and_longer_pauses() -> None:
    case = joined(0)
    case.hear(PlaceLost(0, "has died", "actor"))
    waited = []
    for number in range(1, 10):
        began = case.now
        while len(case.places.asked) <= number:
            case.start(0, 1)
            case.now += 0.25
        waited.append(case.now - began)
        case.hear(PlaceLost(number, "has died", "actor"))
    assert waited == sorted(waited) and waited[0] < 1 < waited[3] and waited[-1] < 32
    assert "asks Ray for another one in a moment" in case.start(0, 1)


def test_an_engine_core_that_ends_alone_keeps_its_place() -> None:
    case = joined(0)
    assert case.start(0, 1) == ("id of n0", 0, 1)
    assert case.places.asked == [0]


def test_a_place_whose_node_was_silent_for_too_long_is_given_back() -> None:
    case = joined(0, 1)
    del case.nodes.there["n1"]
    case.hear()
    assert case.places.dropped == [1]
    case.start(1, 1)
    assert case.places.asked == [0, 1, 2]


def test_places_of_ranks_that_are_not_there_any_more_are_given_back() -> None:
    case = joined(0, 1, 2)
    case.hear(ranks=range(1))
    assert case.places.dropped == [1, 2]
    case.start(1)
    case.hear(PlacePending(3, "it is full"))
    case.now = 1000.0  # it is new again, and so does not wait for ever
    with pytest.raises(Unplaceable):
        case.starter.start(1, 1, {})


def test_news_of_places_that_were_given_back_is_nothing() -> None:
    case = joined(0, 1)
    case.hear(ranks=range(1))
    case.hear(PlaceMade(1, "n1"), PlaceLost(1, "has died", "actor"), ranks=range(1))
    assert case.nodes.lost == []
    case.starter.close()
    assert case.places.closed == 1


# --- what is asked of Ray, and what it says --------------------------------------------------------------------------

FREE = {"CPU": 4.0, "GPU": 1.0}


def nodes(*free: Mapping[str, float], **labels: str) -> list[RayNode]:
    return [RayNode(f"id{n}", f"host{n}", FREE, one, labels) for n, one in enumerate(free)]


def test_ranks_spread() -> None:
    placement = RayPlacement(bundles=[{"CPU": 1}, {"CPU": 2}])
    three = nodes(FREE, FREE, FREE)
    assert choose_node(placement, three, {}, []) == "id0"
    assert choose_node(placement, three, {"id0": 1, "id1": 1}, []) == "id2"
    assert choose_node(placement, three, {"id0": 1, "id1": 1}, ["id2"]) == "id0"
    assert choose_node(placement, nodes({"CPU": 2.0}, FREE), {"id1": 5}, []) == "id1"
    assert choose_node(placement, nodes({"CPU": 2.0}), {}, []) is None
    assert choose_node(RayPlacement(strategy="PACK"), three, {}, []) is None


def test_ranks_spread_over_nodes_with_their_labels() -> None:
    placement = RayPlacement(labels={"zone": "a"})
    assert choose_node(placement, nodes(FREE, zone="b"), {}, []) is None
    assert choose_node(placement, nodes(FREE, zone="a"), {}, []) == "id0"


def test_an_actor_takes_the_whole_first_bundle() -> None:
    placement = RayPlacement(bundles=[{"CPU": 2, "GPU": 1, "memory": 1e9, "seat": 1}, {"CPU": 8}], runtime_env={"a": 1})
    assert actor_options(placement) == {
        "num_cpus": 2,
        "num_gpus": 1,
        "memory": 1e9,
        "resources": {"seat": 1},
        "runtime_env": {"a": 1},
    }
    assert actor_options(RayPlacement(bundles=[{"seat": 1}])) == {
        "num_cpus": 0,
        "num_gpus": 0,
        "resources": {"seat": 1},
    }
    assert describe(placement) == "CPU 2, GPU 1, memory 1e+09, seat 1 and CPU 8"
    assert describe(RayPlacement(labels={"gpu": "L4"})) == "CPU 1 on a node with gpu=L4"


@pytest.mark.parametrize(
    ("text", "preempted", "what", "word"),
    [
        ("...ModuleNotFoundError: No module named 'outboard.launch.ray.actor'", False, "not installed there", "actor"),
        (
            "The actor died.\nThe actor died because its node has died. Node Id: f4\n\tthe actor's node was terminated "
            "expectedly: received SIGTERM",
            False,
            "its machine has left the Ray cluster (terminated expectedly: received SIGTERM)",
            "machine",
        ),
        ("because its node has died.\n\tthe actor's node was preempted: spot", True, "was preempted (", "preempted"),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes",
            False,
            "process has died (SYSTEM_ERROR: Worker unexpectedly exits with a connection error code 2)",
            "actor",
        ),
        ("first\nlast\n", False, "its actor has died (last)", "actor"),
        ("", False, "Ray does not say why", "actor"),
    ],
)
def test_what_has_become_of_an_actor(text: str, preempted: bool, what: str, word: str) -> None:
    reason, said = why_lost(text, preempted)
    assert what in reason and said == word


def test_why_there_is_no_room() -> None:
    assert "at all" in why_pending("INFEASIBLE")
    assert "free" in why_pending("FAILED_TO_COMMIT_RESOURCES")


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bundles": []}, "bundles must name what a rank takes"),
        ({"bundles": [{"CPU": 1}, {}]}, "none may be empty"),
        ({"bundles": [{"CPU": 0}]}, "of 'CPU' a rank must take more than 0, not 0"),
        ({"bundles": [{"CPU": float("inf")}]}, "not inf"),
        ({"bundles": [{"CPU": "1"}]}, "not '1'"),
        ({"strategy": "STRICT_SPREAD"}, "strategy must be 'SPREAD' or 'PACK'"),
        ({"timeout": 0}, "timeout must be above 0"),
    ],
)
def test_a_placement_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayPlacement(**wrong)


def test_a_placement_is_for_ray_alone() -> None:
    with pytest.raises(ConfigError, match="add backend='ray'"):
        ParallelConfig(placement=RayPlacement())
    with pytest.raises(ConfigError, match="backend must be 'local' or 'ray'"):
        ParallelConfig(backend="slurm")  # type: ignore[arg-type]


def test_options_of_the_command() -> None:
    assert ray_placement("local", None, None, None) is None
    assert ray_placement("ray", None, None, None) == RayPlacement()
    placement = RayPlacement(bundles=[{"CPU": 4, "GPU": 0.5}], address="auto", timeout=7)
    assert ray_placement("ray", "CPU=4, GPU=0.5", "auto", 7) == placement
    with pytest.raises(ConfigError, match="need --backend ray"):
        ray_placement("local", None, "auto", None)
    for wrong in ("CPU", "CPU=", "=4", "CPU=four", "CPU=1,,GPU=1", ""):
        with pytest.raises(ConfigError, match="--ray-resources takes NAME=AMOUNT"):
            ray_placement("ray", wrong, None, None)
    assert head_network("lo", None, None, None, None, None, None, with_token=False) == NetworkConfig(listen="lo")


def test_ranks_in_ray_need_a_network() -> None:
    config = EngineConfig(engine="mock", parallel=ParallelConfig(backend="ray"))
    assert with_network(config, "10.0.0.7").network == NetworkConfig(listen="10.0.0.7", port=0, local_ranks=0)
    given = EngineConfig(engine="mock", network=NetworkConfig(listen="eth0", port=7, local_ranks=3))
    assert with_network(given, "10.0.0.7").network == NetworkConfig(listen="eth0", port=7, local_ranks=0)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"backend='ray' needs Ray: install it with pip install 'outboard\[ray\]'"):
        launch_engines(EngineConfig(engine="mock", parallel=ParallelConfig(backend="ray")))


def test_an_engine_that_is_wrong_is_told_before_a_cluster_is_started() -> None:
    with pytest.raises(ConfigError, match="no_such_engine"):
        launch_engines(EngineConfig(engine="no_such_engine", parallel=ParallelConfig(backend="ray")))


def test_ray_from_outside_its_cluster_is_refused() -> None:
    placement = RayPlacement(address="ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match="the head must be in the Ray cluster"):
        launch_engines(EngineConfig(engine="mock", parallel=ParallelConfig(backend="ray", placement=placement)))


def test_nobody_imports_ray_who_does_not_want_it() -> None:
    program = (
        "import sys, outboard\n"
        "config = outboard.EngineConfig(engine='echo')\n"
        "with outboard.launch_engines(config): assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- the node in an actor --------------------------------------------------------------------------------------------


def test_a_node_without_a_head_ends_where_nobody_would_end_it() -> None:
    context = node_context("s" * 32)
    node = Node(context, "tcp://127.0.0.1:1", "s" * 32, lone_for=0.1)
    began = time.monotonic()
    try:
        node.run()
    finally:
        node.close()
        context.term()
    assert time.monotonic() - began < 4.0


LONE_ACTOR = """
import time
from outboard.launch.ray import actor as ray_actor

ray_actor._LINGER = 0.2
actor = ray_actor.OutboardRank("tcp://127.0.0.1:1", "s" * 32, "lone", 0.1)
assert actor.wait(0) is None
print(actor.wait(10), flush=True)
time.sleep(60)
"""


def test_an_actor_without_a_head_ends_itself() -> None:
    done = subprocess.run([sys.executable, "-c", LONE_ACTOR], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot reach the head at tcp://127.0.0.1:1, or not any more, for 0.1 s" in done.stdout
