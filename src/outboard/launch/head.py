"""What a group with a network has more than one without: nodes may join it, and run its ranks."""

from __future__ import annotations

import secrets
import time

import msgspec

from outboard.config import EngineConfig, NetworkConfig, RayPlacement
from outboard.launch.nodes.admission import HeadFacts
from outboard.launch.nodes.desk import NodeDesk
from outboard.launch.placement import LocalStarter, PlacedStarter, Placement
from outboard.launch.rank_process import RankStarter
from outboard.launch.ray.cluster import RayCluster
from outboard.launch.ray.places import RayPlaces
from outboard.launch.ray.starter import RayStarter
from outboard.launch.startup import InitMaker, sendable_options
from outboard.transport.curve import SessionKeys, read_token_file
from outboard.transport.node_server import NodeServer
from outboard.transport.session import SessionDirectory

__all__ = ["connect_ray", "make_starter", "with_network"]

# A node that Ray has started tries so long to reach its head, seconds, or for as long as that may be silent.
_LONE_FOR = 30.0


def connect_ray(config: EngineConfig) -> RayCluster | None:
    """The Ray cluster that places the ranks; None: none does.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    if config.parallel.backend != "ray":
        return None
    return RayCluster(config.parallel.placement or RayPlacement())


def with_network(config: EngineConfig, host: str) -> EngineConfig:
    """With a network for ranks that Ray places; by default at the address by which Ray knows this host."""
    network = config.network or NetworkConfig(listen=host, port=0)
    return msgspec.structs.replace(config, network=msgspec.structs.replace(network, local_ranks=0))


def make_starter(
    config: EngineConfig,
    inits: InitMaker,
    session: SessionDirectory,
    control_address: str,
    tcp_address: str,
    keys: SessionKeys | None,
    cluster: RayCluster | None = None,
) -> tuple[RankStarter, NodeDesk | None]:
    """What starts the ranks of a group, and the desk for nodes that do; None: there is no network.

    Args:
        config: what runs.
        inits: what each rank is to run.
        session: directory and token.
        control_address, tcp_address: where engine cores find the launcher, on this host and from others.
        keys: of the session; None: there is no network.
        cluster: where Ray places all ranks; becomes the starter's own. None: nodes join by themselves.

    Raises:
        ConfigError: the token file cannot be used, or there is no such interface or address.
        OSError: the port is taken.
    """
    network = config.network
    if network is None or keys is None:
        return LocalStarter(session, control_address), None
    secret = secrets.token_hex(32) if network.token_file is None else read_token_file(network.token_file)
    facts = HeadFacts(
        secret=secret,
        engine=inits.engine,
        options=sendable_options(config.options),
        control_address=tcp_address,
        session_token=session.token,
        keys=msgspec.json.encode(keys.for_peers()).decode(),
        interval=network.heartbeat_interval,
        patience=network.patience,
        shutdown_timeout=config.faults.shutdown_timeout,
        stall_timeout=config.faults.stall_timeout,
    )
    nodes = NodeDesk(NodeServer(secret, network), facts, time.monotonic())
    if cluster is not None:
        placement = config.parallel.placement or RayPlacement()
        lone_for = max(_LONE_FOR, network.patience)
        places = RayPlaces(cluster, placement, nodes.address, secret, lone_for)
        return RayStarter(placement, places, nodes), nodes
    local = LocalStarter(session, control_address, network.local_ranks)
    return PlacedStarter(Placement(network.local_ranks), local, nodes.rooms, nodes.start), nodes
