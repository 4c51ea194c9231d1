"""What Ray runs for each rank: an actor with a node (nodes/node.py) of one place.

Ray imports this module on the cluster's nodes, so they need the same Outboard as the head.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time

from outboard.errors import OutboardError
from outboard.launch.nodes.node import Node
from outboard.launch.thread_signals import leave_signals_to_main
from outboard.transport.node_server import node_context

__all__ = ["OutboardRank"]

# Once its node is over whoever made the actor ends it. If nobody does in so long, seconds, it ends itself.
_LINGER = 5.0
# How long, seconds, it then tries to give its room back.
_GIVING_BACK = 5.0


class OutboardRank:
    """Its methods run side by side.

    Args:
        head: where nodes join.
        secret: what they must know.
        name: of the node.
        lone_for: seconds without a head after which it ends.
    """

    def __init__(self, head: str, secret: str, name: str, lone_for: float) -> None:
        self._ended = threading.Event()
        self._failure = ""
        self._context = node_context(secret)
        self._node = Node(self._context, head, secret, name=name, lone_for=lone_for)
        self._head, self._lone_for = head, lone_for
        self._stopped = False
        threading.Thread(target=self._run, name="outboard-node", daemon=True).start()

    def wait(self, seconds: float) -> str | None:
        """Waits for the end, so long at most: why it came, "" if it was wanted; None: it has not come."""
        return self._failure if self._ended.wait(seconds) else None

    def stop(self) -> None:
        """Asks for the end: engine cores may end by themselves. Does not wait."""
        self._stopped = True
        self._node.stop()

    def hold(self, seconds: float) -> None:
        """Does not return before the process has ended, within so long: whoever calls it learns when that is."""
        time.sleep(seconds)

    def _run(self) -> None:
        leave_signals_to_main()
        try:
            self._node.run()
            if not self._stopped:
                self._failure = f"cannot reach the head at {self._head}, or not any more, for {self._lone_for:g} s"
        except (OutboardError, OSError) as error:
            self._failure = str(error)
        self._ended.set()
        threading.Timer(_LINGER + _GIVING_BACK, os._exit, (0,)).start()
        threading.Timer(_LINGER, _leave).start()


def _leave() -> None:
    """Gives back the room that this actor has, and ends it.

    Ray takes back the room of a head that is gone, but does not see it go while a forked copy of it lives.
    """
    ray = sys.modules.get("ray")  # which has made this actor
    try:
        if ray is not None and ray.is_initialized():
            groups = importlib.import_module("ray.util.placement_group")
            groups.remove_placement_group(groups.get_current_placement_group())
    finally:
        os._exit(0)
