"""The thread that speaks with Ray: it asks for room, starts actors there, watches them and gives all back."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from outboard.config import RayPlacement
from outboard.launch.ray.actor import OutboardRank
from outboard.launch.ray.cluster import RayCluster
from outboard.launch.ray.facts import RayNode, actor_options, choose_node, why_lost, why_pending
from outboard.launch.ray.news import PlaceLost, PlaceMade, PlaceNews, PlacePending
from outboard.launch.thread_signals import leave_signals_to_main

__all__ = ["RayPlaces"]

logger = logging.getLogger("outboard.launch")

# Seconds from one look at placement groups that wait to the next, and at nodes that are to be taken away.
_LOOK = 0.1
_LOOK_FOR_DRAINS = 1.0
# Room that has just been given back takes a moment to be known; longer than this there is none, seconds.
_TIME_TO_PLACE = 1.0
# What one call waits for an actor's end; then it is asked again.
_WAIT = 30.0
# An actor that cannot be asked may only be away; it is asked again after so long.
_ASK_AGAIN = 1.0
# How long a node that is not wanted any more may take to say goodbye.
_GOODBYE = 1.0
# What Ray may take at the end to end actors, seconds, and this thread to end itself.
_END = 5.0
_JOIN = 15.0
# So long a node that has lost a rank gets none, if there is another, seconds.
_AVOID = 60.0


@dataclass(slots=True)
class _Group:
    """A placement group, and the actor in it."""

    group: Any
    node_id: str = ""  # where it is, or will be if Ray does as it is asked
    name: str = ""
    since: float = field(default_factory=time.monotonic)
    why: str = ""
    actor: Any = None
    ending: Any = None  # the call that returns at the actor's end
    ask_at: float | None = None
    drop_by: float | None = None


class RayPlaces:
    """Places are told apart by number, each of which is used once. Methods may be called from one other thread.

    Args:
        cluster: becomes its own.
        placement: what each place takes.
        head, secret: where nodes join, and what they must know.
        lone_for: seconds without a head after which they end.

    Attributes:
        fd: readable when there is news.
    """

    def __init__(self, cluster: RayCluster, placement: RayPlacement, head: str, secret: str, lone_for: float) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._groups_api = importlib.import_module("ray.util.placement_group")
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._errors = importlib.import_module("ray.exceptions")
        if cluster.has_runtime_env:
            placement = msgspec.structs.replace(placement, runtime_env={})
        self._placement = placement
        self._arguments = (head, secret)
        self._lone_for = lone_for
        self._mark = secrets.token_hex(4)  # names of placement groups must not be used twice
        self._groups: dict[int, _Group] = {}
        self._lost_on: dict[str, float] = {}  # node id -> when
        self._drains_at = 0.0
        self._said = ""
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._news: SimpleQueue[PlaceNews] = SimpleQueue()
        self._closing = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="outboard-ray", daemon=True)
        self._thread.start()

    # --- for the other thread ---

    def ask(self, number: int) -> None:
        """Wants room."""
        self._orders.put(lambda: self._ask(number))

    def start(self, number: int) -> None:
        """Has a node started where there is room now."""
        self._orders.put(lambda: self._start(number))

    def drop(self, number: int) -> None:
        """Gives a place back, with the node in it."""
        self._orders.put(lambda: self._drop(number))

    def news(self) -> list[PlaceNews]:
        """All since the last call."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        news = []
        while not self._news.empty():
            news.append(self._news.get_nowait())
        return news

    def close(self) -> None:
        """Gives all back, and the connection. Bounded. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._orders.put(lambda: None)
        self._thread.join(_JOIN)
        if self._thread.is_alive():
            logger.warning("Ray does not answer; what it holds for this process it gives back at the process's end")
            return
        fd, self.fd = self.fd, -1
        os.close(fd)

    # --- the thread ---

    def _run(self) -> None:
        leave_signals_to_main()
        try:
            while not self._closing:
                self._turn()
            self._end()
        except Exception:
            logger.exception("the thread that speaks with Ray failed")
            for number in list(self._groups):
                self._tell(PlaceLost(number, "is lost: nobody speaks with Ray any more"))
        finally:
            self._cluster.close()

    def _turn(self) -> None:
        waits = any(not group.name or group.drop_by is not None for group in self._groups.values())
        try:
            order: Callable[[], None] | None = self._orders.get(timeout=_LOOK if waits else _LOOK_FOR_DRAINS)
        except Empty:
            order = None
        try:
            if not self._ray.is_initialized():  # most calls would start a cluster of their own
                self._lose_all("is lost: this process is not connected to Ray any more")
                return
            if order is not None:
                order()
            self._look(time.monotonic())
            self._said = ""
        except self._errors.RayError as error:
            self._say(f"Ray: {error}")

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            logger.warning("%s; it is tried on", what)

    def _look(self, now: float) -> None:
        for number, group in list(self._groups.items()):
            if group.drop_by is not None:
                if now >= group.drop_by:
                    self._free(number)
            elif not group.name:
                self._look_for_room(number, group)
            elif group.ask_at is not None and now >= group.ask_at:
                self._watch(number, group)
        if now >= self._drains_at:
            self._drains_at = now + _LOOK_FOR_DRAINS
            self._look_for_drains()

    # --- room ---

    def _ask(self, number: int) -> None:
        placement = self._placement
        target = self._choose_node()
        labels = {"bundle_label_selector": [placement.labels] * len(placement.bundles)} if placement.labels else {}
        try:
            group = self._groups_api.placement_group(
                placement.bundles,
                strategy="STRICT_PACK",
                name=f"outboard-{self._mark}-{number}",
                _soft_target_node_id=target,
                **labels,
            )
        except (ValueError, self._errors.RayError) as error:
            self._tell(PlaceLost(number, f"cannot be had: {error}"))
            return
        self._groups[number] = _Group(group, target or "")

    def _choose_node(self) -> str | None:
        now = time.monotonic()
        taken: dict[str, int] = {}
        for group in self._groups.values():
            taken[group.node_id] = taken.get(group.node_id, 0) + 1
        avoid = [node_id for node_id, when in self._lost_on.items() if now - when < _AVOID]
        return choose_node(self._placement, self._nodes(), taken, avoid)

    def _nodes(self) -> list[RayNode]:
        free = importlib.import_module("ray._private.state").available_resources_per_node()
        return [
            RayNode(
                node["NodeID"], node["NodeManagerHostname"], node["Resources"], free[node["NodeID"]], node["Labels"]
            )
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] in free
        ]

    def _look_for_room(self, number: int, group: _Group) -> None:
        table = self._groups_api.placement_group_table(group.group)
        if table["state"] == "CREATED":
            group.node_id = next(iter(table["bundles_to_node_id"].values()))
            hosts = {node.node_id: node.host for node in self._nodes()}
            group.name = f"{hosts.get(group.node_id, 'node')[:40]}-{group.node_id[:6]}-{number}"
            self._tell(PlaceMade(number, group.name))
            return
        why = why_pending(table["stats"]["scheduling_state"])
        if why != group.why and time.monotonic() - group.since >= _TIME_TO_PLACE:
            group.why = why
            self._tell(PlacePending(number, why))

    # --- actors ---

    def _start(self, number: int) -> None:
        group = self._groups.get(number)
        if group is None or group.actor is not None or group.drop_by is not None:
            return
        strategy = self._strategies.PlacementGroupSchedulingStrategy(group.group, placement_group_bundle_index=0)
        options = actor_options(self._placement)
        options |= {"max_restarts": 0, "max_concurrency": 4, "scheduling_strategy": strategy}
        try:
            actor = self._ray.remote(OutboardRank).options(**options)
            group.actor = actor.remote(*self._arguments, group.name, self._lone_for)
        except Exception as error:  # whatever Ray has against this runtime_env or these resources
            self._lose(number, f"cannot be started: {error}", "actor")
            return
        self._watch(number, group)

    def _watch(self, number: int, group: _Group) -> None:
        group.ask_at = None
        group.ending = group.actor.wait.remote(_WAIT)
        # In a thread of Ray's.
        group.ending.future().add_done_callback(lambda end: self._orders.put(lambda: self._on_end(number, end)))

    def _on_end(self, number: int, end: Future[str | None]) -> None:
        """A call that waits for an actor's end has returned."""
        group = self._groups.get(number)
        if group is None:
            return
        error = end.exception()
        if error is None:
            failure = end.result()
            if failure is None:
                self._watch(number, group)
                return
            self._lose(number, *((f"has ended: {failure}", "actor") if failure else ("was stopped", "stopped")))
        elif isinstance(error, self._errors.ActorUnavailableError):
            group.ask_at = time.monotonic() + _ASK_AGAIN
        else:
            self._lose(number, *why_lost(str(error), bool(getattr(error, "preempted", False))))

    def _look_for_drains(self) -> None:
        """What is on a machine that is to be taken away is lost at once, to be elsewhere when it goes."""
        if not self._groups:
            return
        draining = importlib.import_module("ray._private.state").state.get_draining_nodes()
        for number, group in list(self._groups.items()):
            if group.name and group.node_id in draining:
                self._lose(number, "was preempted: Ray takes its machine away", "preempted")

    # --- the end of places ---

    def _lose(self, number: int, what: str, word: str) -> None:
        group = self._groups[number]
        if group.drop_by is None:
            self._lost_on[group.node_id] = time.monotonic()
            self._tell(PlaceLost(number, what, word))
        self._free(number)

    def _lose_all(self, what: str) -> None:
        for number in list(self._groups):
            del self._groups[number]
            self._tell(PlaceLost(number, what))

    def _drop(self, number: int) -> None:
        group = self._groups.get(number)
        if group is None or group.drop_by is not None:
            return
        if group.actor is None:
            self._free(number)
            return
        group.drop_by = time.monotonic() + _GOODBYE
        group.actor.stop.remote()

    def _free(self, number: int) -> None:
        group = self._groups.pop(number)
        if group.actor is not None:
            self._ray.kill(group.actor)
        self._groups_api.remove_placement_group(group.group)

    def _end(self) -> None:
        if not self._ray.is_initialized():
            return
        while not self._orders.empty():
            self._orders.get_nowait()
        groups = list(self._groups.values())
        for group in groups:
            if group.actor is not None:
                group.actor.stop.remote()
        ends = [group.ending for group in groups if group.actor is not None]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_GOODBYE)
        ends = [group.actor.hold.remote(_WAIT) for group in groups if group.actor is not None]
        for number in list(self._groups):
            self._free(number)
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_END)

    def _tell(self, news: PlaceNews) -> None:
        self._news.put(news)
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)
