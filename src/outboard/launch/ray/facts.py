"""What is to be known of Ray, without Ray: which node to ask for, what to say of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outboard.config import RayPlacement

__all__ = ["RayNode", "actor_options", "choose_node", "describe", "why_lost", "why_pending"]

_LONGEST = 300


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster that is alive.

    Attributes:
        node_id: Ray's.
        host: its name.
        total, free: resources.
        labels: by name.
    """

    node_id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def choose_node(
    placement: RayPlacement, nodes: Sequence[RayNode], taken: Mapping[str, int], avoid: Sequence[str]
) -> str | None:
    """The node to ask Ray for, which takes another one if it must; None: any.

    Ray itself only looks at how much of each node is taken, by whomever, and not at what has just been lost there.

    Args:
        placement: what a rank takes.
        nodes: of the cluster.
        taken: how many ranks each node has, by id.
        avoid: ids of nodes that have lost a rank lately.
    """
    if placement.strategy == "PACK":
        return None
    need: dict[str, float] = {}
    for bundle in placement.bundles:
        for name, amount in bundle.items():
            need[name] = need.get(name, 0.0) + amount
    fits = [
        node
        for node in nodes
        if all(node.free.get(name, 0.0) >= amount for name, amount in need.items())
        and all(node.labels.get(name) == value for name, value in placement.labels.items())
    ]
    best = min(fits, key=lambda node: (node.node_id in avoid, taken.get(node.node_id, 0)), default=None)
    return best.node_id if best is not None else None


def actor_options(placement: RayPlacement) -> dict[str, object]:
    """Options of an actor that takes the whole first bundle; what Ray gives it, such as GPUs, its engine core gets."""
    rest = dict(placement.bundles[0])
    options: dict[str, object] = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
    if "memory" in rest:
        options["memory"] = rest.pop("memory")
    options["resources"] = rest
    if placement.runtime_env:
        options["runtime_env"] = dict(placement.runtime_env)
    return options


def describe(placement: RayPlacement) -> str:
    """What a rank takes, such as "CPU 4, GPU 1 on a node with gpu=L4"."""
    bundles = " and ".join(
        ", ".join(f"{name} {amount:g}" for name, amount in bundle.items()) for bundle in placement.bundles
    )
    labels = ", ".join(f"{name}={value}" for name, value in placement.labels.items())
    return f"{bundles} on a node with {labels}" if labels else bundles


def why_pending(scheduling_state: str) -> str:
    """Why a placement group has no place, from what Ray says of it."""
    if scheduling_state == "INFEASIBLE":
        return "no node of the Ray cluster has as much at all"
    return "no node of the Ray cluster has as much free"


def why_lost(text: str, preempted: bool) -> tuple[str, str]:
    """What has become of an actor, from Ray's error: "has died", say; and in one word, see `EngineDeadError.lost`."""
    if "No module named 'outboard" in text:
        return (
            "cannot run Outboard: it is not installed there, or is another version; install the head's, or have Ray do "
            "it, with RayPlacement(runtime_env={'pip': ['outboard[ray]']})",
            "actor",
        )
    detail = ""
    if found := re.search(r"actor's node was ([^\n]+)", text):
        detail = f" ({found[1].strip()})"
    elif found := re.search(r"Worker exit type: (\w+) Worker exit detail: ([^.\n]*)", text):
        detail = f" ({found[1]}: {found[2].strip()})"
    if preempted:
        return f"was preempted{detail}", "preempted"
    if "its node has died" in text:
        return f"is lost, its machine has left the Ray cluster{detail}", "machine"
    if "worker process has died" in text:
        return f"is lost, its actor's process has died{detail}", "actor"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"is lost, its actor has died ({lines[-1][:_LONGEST] if lines else 'Ray does not say why'})", "actor"
