"""What the launcher's processes find in their environment: where to connect, the secret to show there, their mark."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Self

import msgspec

__all__ = ["ENGINE_MARK", "REPORT_FD", "ChildEnvironment", "CoordinatorEnvironment"]

_PREFIX = "OUTBOARD_"
REPORT_FD = _PREFIX + "REPORT_FD"
# A random name, no secret. It stays in the environment, so that the engine's descendants have it too: by it they are
# found where their warden was killed. Several, with spaces between, where one engine core runs under another.
ENGINE_MARK = _PREFIX + "ENGINE"


class _Environment(msgspec.Struct, frozen=True):
    """Fields as environment variables."""

    def to_environ(self) -> dict[str, str]:
        """As environment variables."""
        return {_PREFIX + name.upper(): str(getattr(self, name)) for name in self.__struct_fields__}

    @classmethod
    def take_from(cls, environ: MutableMapping[str, str]) -> Self:
        """Reads the variables and removes them: an engine's own children have no business with them."""
        values = {name: environ.pop(_PREFIX + name.upper()) for name in cls.__struct_fields__}
        return msgspec.convert(values, cls, strict=False)


class ChildEnvironment(_Environment, frozen=True):
    """Set by the launcher, except for the report page's descriptor, which is known only once the process is made.

    Attributes:
        control_address: ZeroMQ address of the control channel.
        session_token: the session's secret; by the environment, not by arguments, which everybody can read.
        rank, incarnation: which engine core this is.
        keys: what encrypts its connections to other hosts; "": it has none.
        search_path: where it finds modules, with `os.pathsep` between; "": as the launcher says by `Init`.
        place, places: its host's CPUs are shared by so many engine cores, of which it is this one; 0: by all ranks.
    """

    control_address: str
    session_token: str
    rank: int
    incarnation: int
    keys: str = ""
    search_path: str = ""
    place: int = 0
    places: int = 0


class CoordinatorEnvironment(_Environment, frozen=True):
    """Of a coordinator.

    Attributes:
        control_address, session_token: as of an engine core.
        coordinator_address: where to bind.
        incarnation: how often the coordinator has been started before.
        network: where to listen for engine cores on other hosts, as JSON; "": nowhere.
        keys: what encrypts that.
    """

    control_address: str
    session_token: str
    coordinator_address: str
    incarnation: int
    network: str = ""
    keys: str = ""
