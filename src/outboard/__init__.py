"""Outboard runs an inference engine in a process of its own and drives it from asyncio."""

from __future__ import annotations

from outboard._version import __version__ as __version__

TYPE_CHECKING = False  # `typing` takes a while to import
if TYPE_CHECKING:
    from outboard._api import *  # noqa: F403
    from outboard.errors import *  # noqa: F403
else:
    # The names come at the first use of any, `__all__` too: the command must be ready for Ctrl-C before it imports
    # much, and an engine core needs no clients.
    def __getattr__(name: str) -> object:
        names = globals()
        if name == "__all__" or not name.startswith("__"):
            import importlib

            api = importlib.import_module("outboard._api")
            names |= {public: getattr(api, public) for public in api.__all__}
            names["__all__"] = api.__all__
        if name not in names:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return names[name]

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), *globals()})
