"""Options of engine cores that Ray places."""

from __future__ import annotations

from typing import Any, Literal

from outboard.config import RayPlacement
from outboard.errors import ConfigError

__all__ = ["ray_placement"]


def ray_placement(
    backend: Literal["local", "ray"], resources: str | None, address: str | None, room_timeout: float | None
) -> RayPlacement | None:
    """What a rank takes of which cluster; None: Ray has nothing to do with it.

    Args:
        resources: such as "CPU=4,GPU=1".

    Raises:
        ConfigError: an option is wrong, or of no use without `--backend ray`.
    """
    given: dict[str, Any] = {"address": address, "timeout": room_timeout}
    given = {name: value for name, value in given.items() if value is not None}
    if resources is not None:
        given["bundles"] = [_bundle(resources)]
    if backend == "ray":
        return RayPlacement(**given)
    if given:
        raise ConfigError("options for Ray need --backend ray")
    return None


def _bundle(resources: str) -> dict[str, float]:
    bundle = {}
    for part in resources.split(","):
        name, equals, amount = part.strip().partition("=")
        try:
            if not name or not equals:
                raise ValueError
            bundle[name] = float(amount)
        except ValueError:
            raise ConfigError(
                f"--ray-resources takes NAME=AMOUNT,..., such as CPU=4,GPU=1, not {resources!r}"
            ) from None
    return bundle
