"""Whether a node may join a head. Pure."""

from __future__ import annotations

import hmac
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outboard._version import __version__
from outboard.protocol.messages import PROTOCOL_VERSION
from outboard.protocol.nodes import NodeHello, proof_of

__all__ = ["HeadFacts", "refusal_of"]

_LONGEST_NAME = 64
_MOST_RANKS = 256


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the head is, and what it tells nodes.

    Attributes:
        secret: what nodes must know.
        engine, options: what runs; a node may be willing to run something else only.
        control_address, session_token, keys, interval, patience, shutdown_timeout, stall_timeout: as in `NodeWelcome`.
    """

    secret: str = field(repr=False)
    engine: str
    options: Mapping[str, Any]
    control_address: str
    session_token: str
    keys: str = ""
    interval: float = 1.0
    patience: float = 10.0
    shutdown_timeout: float = 10.0
    stall_timeout: float = 60.0


def refusal_of(hello: NodeHello, facts: HeadFacts) -> str:
    """Why this node cannot join; "": it can."""
    if not hmac.compare_digest(hello.proof, proof_of(facts.secret, hello.node_id)):
        return "its token is not this head's: both must have the same token file"
    if (hello.protocol_version, hello.outboard_version) != (PROTOCOL_VERSION, __version__):
        return (
            f"it has outboard {hello.outboard_version} (protocol version {hello.protocol_version}), the head has "
            f"{__version__} ({PROTOCOL_VERSION}): both must have the same"
        )
    if _minor(hello.python_version) != _minor(platform.python_version()):
        return f"it has Python {hello.python_version}, the head has {platform.python_version()}"
    if not (1 <= hello.ranks <= _MOST_RANKS):
        return f"it has room for {hello.ranks} ranks; there must be 1 to {_MOST_RANKS}"
    if not hello.node_id or not hello.name.isprintable() or not 0 < len(hello.name) <= _LONGEST_NAME:
        return f"its name must be 1 to {_LONGEST_NAME} printable characters, not {hello.name[:100]!r}"
    if hello.engine and hello.engine != facts.engine:
        return f"it is willing to run {hello.engine} only, the head runs {facts.engine}"
    for name, theirs in hello.options.items():
        if name not in facts.options:
            return f"it is willing to run with {name}={theirs} only, the head does not set {name}"
        if not _same(theirs, facts.options[name]):
            return f"it is willing to run with {name}={theirs} only, the head has {name}={facts.options[name]}"
    return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _same(stated: Any, actual: Any) -> bool:
    """Whether two values of an option are the same; on a command line all are text."""
    return bool(stated == actual) or str(stated).lower() == str(actual).lower()
