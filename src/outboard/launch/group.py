"""`launch_engines`: engine cores with an owner of their own, for one front end or many."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack
from typing import Any, Self

import msgspec

from outboard.config import EngineConfig, FaultConfig, NetworkConfig, ParallelConfig, TransportConfig
from outboard.launch.head import connect_ray, make_starter, with_network
from outboard.launch.launcher import Launcher
from outboard.launch.scaler import ScaleOrder
from outboard.launch.startup import InitMaker, sendable_options
from outboard.protocol.control import EngineState, EngineStatus
from outboard.protocol.scaling import (
    Scale,
)
from outboard.transport.curve import SessionKeys
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ControlServer, make_context

__all__ = ["EngineAddresses", "EngineGroup", "launch_engines"]

# After `shutdown_timeout` what remains is killed; the system may need some time for that.
_KILL_BOUND = 30.0
# What a launcher has to give back when the interpreter exits takes milliseconds, on a busy machine longer; it may hold
# the exit up so long.
_EXIT_BOUND = 5.0


class EngineAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end must know to join a group of engine cores. Encodes with `msgspec.msgpack.encode`.

    It holds the session's secret: hand it on by a pipe, a file of mode 0600 or the environment, never by arguments.

    Attributes:
        control_address: ZeroMQ address of the control channel.
        session_token: the secret.
        directory: the session's directory; front ends put their sockets there.
        launcher_pid: process id of the launcher; its end is the end of the engine cores.
        engine: reference of what runs, "module:Class" or "path.py:Class".
        options, parallel, faults, transport, network: as in its `EngineConfig`.
        keys: of all connections to other hosts; None: there is no network.
    """

    control_address: str
    session_token: str
    directory: str
    launcher_pid: int
    engine: str
    options: dict[str, Any]
    parallel: ParallelConfig
    faults: FaultConfig
    transport: TransportConfig
    network: NetworkConfig | None = None
    keys: SessionKeys | None = None

    @property
    def config(self) -> EngineConfig:
        """What runs."""
        return EngineConfig(
            engine=self.engine,
            options=self.options,
            parallel=self.parallel,
            faults=self.faults,
            transport=self.transport,
            network=self.network,
        )


class EngineGroup:
    """Running engine cores. Whoever made it is their owner: they end with `shutdown`, and with this process.

    Made by `launch_engines`; a context manager. Dropping the last reference ends the engine cores in the background.

    Attributes:
        addresses: for `AsyncMPClient(addresses=...)`, here or in other processes.
    """

    def __init__(self, config: EngineConfig, *, cancel_fd: int | None = None) -> None:
        inits = InitMaker(config)
        with ExitStack() as undo:
            cluster = connect_ray(config)
            if cluster is not None:
                undo.callback(cluster.close)
                config = with_network(config, cluster.host)
            session = SessionDirectory()
            undo.callback(session.remove)
            keys = SessionKeys.make() if config.network is not None else None
            context = make_context(keys)
            undo.callback(context.destroy, linger=0)
            address = session.address("control")
            control = ControlServer(context, address, network=config.network)
            undo.callback(control.close)
            starter, nodes = make_starter(config, inits, session, address, control.tcp_address, keys, cluster)
            if nodes is not None:
                undo.callback(nodes.close)
            undo.callback(starter.close)
            launcher = Launcher(config, inits, context, session, control, address, starter, nodes, keys, cancel_fd)
            self._launcher, self._nodes = launcher, nodes
            launcher.thread.start()
            undo.pop_all()
        self._shutdown_timeout = config.faults.shutdown_timeout
        self.addresses = EngineAddresses(
            control_address=address,
            session_token=session.token,
            directory=str(session.path),
            launcher_pid=os.getpid(),
            engine=inits.engine,
            options=sendable_options(config.options),
            parallel=config.parallel,
            faults=config.faults,
            transport=config.transport,
            network=config.network,
            keys=keys,
        )
        try:
            launcher.started.result()
        except BaseException:
            launcher.stop(0)  # an interrupt such as Ctrl-C, or what has failed and is gone already
            launcher.join(_KILL_BOUND)
            raise
        # The finalizer must not reach the group, or it would never run.
        self._finalizer = weakref.finalize(self, _abandon, launcher)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    @property
    def join_address(self) -> str:
        """Where nodes join, "tcp://host:port"; "": there is no network."""
        return self._nodes.address if self._nodes is not None else ""

    @property
    def join_secret(self) -> str:
        """What nodes must know: what the token file holds, or a random secret where there is none. Keep it so."""
        return self._nodes.secret if self._nodes is not None else ""

    @property
    def engines(self) -> list[EngineStatus]:
        """The state of every engine core, by rank."""
        return self._launcher.desk.statuses

    def wait_for(self, *states: EngineState, rank: int = 0, timeout: float | None = None) -> EngineStatus:
        """Blocks until a rank is in one of these states; its status.

        Raises:
            TimeoutError: it was not, within `timeout` seconds.
        """
        if not self._launcher.desk.wait_for(lambda engines: engines[rank].state in states, timeout):
            wanted = " or ".join(state.name for state in states)
            raise TimeoutError(f"engine core rank {rank} was not {wanted} within {timeout:g} s")
        return self.engines[rank]

    @property
    def data_parallel_size(self) -> int:
        """How many ranks get requests; `engines` also has those on their way in or out."""
        return self._launcher.desk.members

    def scale(self, new_size: int, *, timeout: float | None = None, drain: float = 60.0) -> None:
        """Changes the number of ranks while they serve. Blocks until that is done, or has been taken back.

        An interrupt ends the waiting alone.

        Args:
            new_size: how many ranks there are to be.
            timeout: seconds for new ranks to get ready, and again to count; default `FaultConfig.startup_timeout`.
            drain: seconds that ranks which leave get to end their requests; what is left then moves, resumes or ends as
                `FaultConfig.in_flight` says.

        Raises:
            ConfigError: the size is out of bounds.
            ScaleInProgressError: another change is under way.
            ScaleRolledBackError: it failed; there are as many ranks as before.
            ScaleError: the engine cores are starting, or being stopped.
            UnsupportedError: the engine, or a group made for a single rank, cannot be scaled.
        """
        seconds = self.addresses.faults.startup_timeout if timeout is None else timeout
        order = ScaleOrder(Scale(0, new_size, seconds, drain))
        self._launcher.scale(order)
        order.done.result()

    @property
    def refused(self) -> dict[str, int]:
        """How many connections of strangers to the launcher's ports, and the coordinator's, were turned away."""
        return self._launcher.refused

    def stats(self) -> dict[str, Any]:
        """Counters: messages dropped by reason; by client index the last state that each front end has acknowledged.

        And the coordinator's process id and incarnation, where there is one. Where there is a network: the nodes that
        have joined, messages of nodes that were dropped, and connections of strangers that were turned away, by reason
        (see `MPClient.stats`).
        """
        desk = self._launcher.desk
        acknowledged = {one.client_index: one.acknowledged for one in desk.front_ends}
        coordinator = self._launcher.coordinator
        stats = {"dropped": dict(desk.dropped), "acknowledged": acknowledged, "coordinator": coordinator}
        if self._nodes is not None:
            stats["nodes"] = [
                {"name": room.name, "places": room.places, "taken": room.taken, "leaving": room.leaving}
                for room in self._nodes.rooms()
            ]
            stats["nodes_dropped"] = dict(self._nodes.dropped)
            stats["refused"] = self.refused
        return stats

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops all engine cores and frees everything. Idempotent, bounded, callable from any thread. Blocks.

        Args:
            timeout: seconds that they get to stop by themselves; default `FaultConfig.shutdown_timeout`.
        """
        launcher = self._launcher
        if os.getpid() != launcher.creator:
            return  # a forked copy owns nothing
        seconds = self._shutdown_timeout if timeout is None else timeout
        launcher.stop(seconds)
        launcher.join(seconds + _KILL_BOUND)
        self._finalizer.detach()

    def kill(self) -> None:
        """Has all engine cores killed. Does not wait; `shutdown` is still to be called."""
        self._launcher.stop(0)

    def abandon(self) -> None:
        """Has all ended in the background. For finalizers: takes no lock and never blocks."""
        self._launcher.abandon()


def _abandon(launcher: Launcher) -> None:
    """The finalizer: also runs when the interpreter exits, whose end would cut the launcher's thread off."""
    launcher.abandon()
    if os.getpid() == launcher.creator and not threading.main_thread().is_alive():
        launcher.join(_EXIT_BOUND)


def launch_engines(config: EngineConfig | str | type[Any], *, cancel_fd: int | None = None) -> EngineGroup:
    """Starts the engine cores of a config; returns when all are ready. Use it in a `with` statement.

        with launch_engines(EngineConfig(engine="echo")) as group:
            client = AsyncMPClient(addresses=group.addresses, client_index=0)

    Args:
        config: what to run; a bare engine name, reference or class stands for `EngineConfig(engine=...)`.
        cancel_fd: a file descriptor that becomes readable when start-up is to be given up.

    Raises:
        ConfigError: the engine, an option or a model file is wrong; a subclass says which.
        EngineStartupError: an engine core died, failed or was too slow; all others have been stopped.
        OSError: no process, descriptor or directory is to be had.
    """
    return EngineGroup(config if isinstance(config, EngineConfig) else EngineConfig(engine=config), cancel_fd=cancel_fd)
