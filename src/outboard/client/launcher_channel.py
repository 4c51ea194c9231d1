"""A client's end of the control channel, and its watch over the launcher at the other end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from outboard.client.driver import Driver
from outboard.client.receiver import Counters
from outboard.errors import EngineDeadError, ProtocolError
from outboard.launch.group import EngineAddresses
from outboard.launch.signs import process_ended
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.control import (
    Attached,
    CoordinatorAt,
    EngineProgress,
    EngineStatus,
    Welcome,
)
from outboard.protocol.messages import Refused
from outboard.protocol.scaling import (
    Members,
    ScaleProgress,
    ScaleRefused,
)
from outboard.protocol.tensors import Buffer
from outboard.transport.reader import SocketReader
from outboard.transport.sockets import ZmqContext, connect_control, wait_readable

__all__ = ["FromLauncher", "LauncherChannel"]

FromLauncher: TypeAlias = (
    Welcome
    | EngineStatus
    | EngineProgress
    | Attached
    | CoordinatorAt
    | Members
    | ScaleProgress
    | ScaleRefused
    | Refused
)


class LauncherChannel:
    """Belongs to the client's thread.

    Args:
        context: for the socket.
        addresses: of the launcher.
        watch: whether the launcher is another process, whose end must be noticed.
        counters: of messages; junk is counted.
        on_message: called with each message.
        on_gone: called when the launcher has ended, with the error that says so.

    Raises:
        EngineDeadError: it has ended already.
    """

    def __init__(
        self,
        context: ZmqContext,
        addresses: EngineAddresses,
        watch: bool,
        counters: Counters,
        on_message: Callable[[FromLauncher], None],
        on_gone: Callable[[EngineDeadError], None],
    ) -> None:
        self._addresses = addresses
        self._counters = counters
        self._on_message = on_message
        self._on_gone = on_gone
        self._driver: Driver | None = None
        self._pidfd = self._open_launcher() if watch else -1
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(FromLauncher)
        self._socket = connect_control(context, addresses.control_address)
        self._reader = SocketReader(self._socket, self._take)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def tell(self, message: Any) -> None:
        """Sends a message."""
        self._socket.send(self._encode(message))
        self._reader.look_again()

    def drain(self) -> bool:
        """Takes one message, if there is one; whether there was."""
        return self._reader.drain(1) > 0

    def wait(self, seconds: float) -> None:
        """Blocks until there is a message, or for so long.

        Raises:
            EngineDeadError: the launcher has ended.
        """
        if wait_readable(self._socket, [self._pidfd] if self._pidfd >= 0 else [], seconds):
            while self.drain():
                pass
            raise self._gone()

    def attach(self, driver: Driver) -> None:
        """Reads on, in `driver`'s thread."""
        self._driver = driver
        self._reader.attach(driver)
        if self._pidfd >= 0:
            driver.add_reader(self._pidfd, self._on_launcher_exit)

    def detach(self) -> None:
        """Reads no more. Idempotent."""
        self._reader.detach()
        if self._pidfd >= 0:
            if self._driver is not None and not self._driver.is_closed():
                self._driver.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def close(self, linger_ms: int) -> None:
        """Closes the socket; what was sent last may take so long to leave. Idempotent."""
        self._socket.close(linger=linger_ms)

    def _take(self, body: Buffer, aux: Sequence[Buffer]) -> None:
        try:
            message = self._decoder.decode(body, aux)
        except ProtocolError as error:
            self._counters.drop("undecodable control message", str(error))
        else:
            self._on_message(message)

    def _on_launcher_exit(self) -> None:
        self._on_gone(self._gone())

    def _gone(self) -> EngineDeadError:
        pid = self._addresses.launcher_pid
        return EngineDeadError(f"the launcher (pid {pid}) is gone, and the engine cores with it")

    def _open_launcher(self) -> int:
        try:
            pidfd = os.pidfd_open(self._addresses.launcher_pid)
        except ProcessLookupError:
            raise self._gone() from None
        # A launcher that lives may have shut its engine cores down.
        if not os.path.exists(self._addresses.directory) or process_ended(pidfd):  # noqa: PTH110 - a plain string
            os.close(pidfd)
            raise self._gone()
        return pidfd
