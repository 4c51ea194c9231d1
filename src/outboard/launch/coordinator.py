"""The coordinator's process as the launcher keeps it: started again whenever it ends. Nothing here waits."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from outboard.config import NetworkConfig
from outboard.errors import EngineStartupError
from outboard.launch.process import EngineProcess, describe_exit
from outboard.protocol.control import CoordinatorAt, CoordinatorReady
from outboard.protocol.environment import CoordinatorEnvironment
from outboard.transport.curve import SessionKeys
from outboard.transport.session import SessionDirectory

__all__ = ["CoordinatorKeeper"]

logger = logging.getLogger("outboard.launch")

# The first restart is at once: balancing and waves go on without it, but not as well.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 10.0
# One that has lived so long, seconds, is no sign of trouble when it ends.
_HEALTHY = 30.0
# So many that end before they are ready, one after the other: there will be none.
_MOST_FAILURES = 5
# For the process and its warden to go once killed, seconds.
_KILL_BOUND = 15.0


class CoordinatorKeeper:
    """Belongs to the launcher's thread. Starts nothing before `start`.

    Args:
        session: directory and token.
        control_address: where the coordinator finds the launcher.
        network, keys: for ranks on other hosts; None: there are none.

    Attributes:
        incarnation: of the coordinator that runs, or ran last.
        process: it; None before the first, and between two.
        place: where it can be reached; None: nowhere now.
        far_place: the same for ranks on other hosts.
        due: when to call `tick`; None: nothing is due.
        failure: why there is none, and will be none.
    """

    def __init__(
        self,
        session: SessionDirectory,
        control_address: str,
        network: NetworkConfig | None = None,
        keys: SessionKeys | None = None,
    ) -> None:
        self._session = session
        self._network = _encode(network)
        self._keys = _encode(keys)
        self._control_address = control_address
        self._started_at = 0.0
        self._pause = 0.0
        self._failures = 0
        self._stopping = False
        self.incarnation = -1
        self.process: EngineProcess | None = None
        self.place: CoordinatorAt | None = None
        self.far_place: CoordinatorAt | None = None
        self.due: float | None = None
        self.failure: EngineStartupError | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is to be one."""
        return self.incarnation >= 0 and not self._stopping

    def start(self, now: float) -> None:
        """Starts the first, or the next."""
        self.due = None
        self.incarnation += 1
        self._started_at = now
        where = CoordinatorEnvironment(
            self._control_address,
            self._session.token,
            self._address(self.incarnation),
            self.incarnation,
            self._network,
            self._keys,
        )
        command = [sys.executable, "-P", "-m", "outboard.dp.coordinator"]
        try:
            self.process = EngineProcess.start({**os.environ, **where.to_environ()}, self._session.path, command)
        except OSError as error:
            self._failed(now, f"it cannot be started: {error}")

    def tick(self, now: float) -> None:
        """Starts the next, if it is time; or ends what does not end."""
        if self.due is None or now < self.due:
            return
        if not self._stopping:
            self.start(now)
        elif self.process is not None:
            self.process.end(0)
            self.exited(now)

    def ready(self, message: CoordinatorReady) -> CoordinatorAt | None:
        """It says that it can be reached. Returns what to tell engine cores and front ends; None: it is a late one."""
        if self.process is None or message.incarnation != self.incarnation or self.place is not None:
            return None
        self.process.identify(message.pid, message.pid)
        self._failures = 0
        self.place = CoordinatorAt(self.incarnation, self._address(self.incarnation))
        if message.tcp_address:
            self.far_place = CoordinatorAt(self.incarnation, message.tcp_address)
        return self.place

    def exited(self, now: float) -> None:
        """The process has ended, and all that belongs to it."""
        process, self.process, self.place, self.far_place = self.process, None, None, None
        assert process is not None  # its sentinel told
        self.due = None
        if not self._stopping:
            self._failed(now, describe_exit(process.poll()) + "\n" + process.report.read_stderr_tail())
        process.close()

    def stop(self, now: float) -> None:
        """Ends it. Does not wait."""
        if self._stopping:
            return
        self._stopping = True
        self.due = None
        if self.process is not None:
            self.process.kill()
            self.due = now + _KILL_BOUND

    def abandon(self) -> None:
        """Has it ended and released in the background."""
        process, self.process = self.process, None
        if process is not None:
            process.abandon()

    def _failed(self, now: float, how: str) -> None:
        self._pause = min(self._pause * 2, _LONGEST_PAUSE) if now - self._started_at < _HEALTHY else 0.0
        self._failures += 1
        logger.warning("the coordinator ended, and is being started again: %s", how.strip())
        self.due = now + self._pause
        self._pause = max(self._pause, _FIRST_PAUSE)
        if self._failures >= _MOST_FAILURES:
            self.failure = EngineStartupError(f"the coordinator does not get ready: {how}", phase="start-up")

    def _address(self, incarnation: int) -> str:
        return self._session.address(f"coord-{incarnation}")


def _encode(value: NetworkConfig | SessionKeys | None) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()
