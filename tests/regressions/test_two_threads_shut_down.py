"""Two threads that shut a blocking client down at once closed a descriptor twice, the second time maybe another's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outboard import SyncMPClient, launch_engines

pytestmark = pytest.mark.usefixtures("nothing_left")


class _Together:
    """A loop that has ended; whoever asks for that waits for a second one to ask, if there can be one."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)

    def is_closed(self) -> bool:
        try:
            self._both.wait(1)
        except threading.BrokenBarrierError:
            pass
        return True


def test_a_blocking_client_is_shut_down_by_two_threads_at_once() -> None:
    with launch_engines("echo") as group:
        client = SyncMPClient(addresses=group.addresses)
        client._membership._driver = _Together()  # type: ignore[assignment] # asked just before the descriptor is closed
        with ThreadPoolExecutor(2) as threads:
            for shutdown in [threads.submit(client.shutdown) for _ in range(2)]:
                shutdown.result(timeout=20)
