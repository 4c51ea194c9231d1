"""Finding an engine class by its reference, and fitting options to its constructor.

A reference is "module:Class" or "path.py:Class". Names of engines that come along are resolved before, by
`engines.registry`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import threading
import typing
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import msgspec

from outboard.engine.core import EngineCore
from outboard.errors import EngineNotFoundError, EngineOptionError

__all__ = ["IMPORTING_ENGINE", "OptionInfo", "bind_options", "engine_options", "engine_reference", "load_engine_class"]

# Set in the environment while an engine-core process imports its engine: a client started then would, in its own
# engine-core process, start itself again.
IMPORTING_ENGINE = "OUTBOARD_IMPORTING_ENGINE"

# Modules made of a file get a name of their own, so that a script's `if __name__ == "__main__"` part does not run.
_FILE_MODULE = "_outboard_engine_"


def engine_reference(engine: type[Any]) -> str:
    """The reference by which a class travels to the child: "module:Class", or "path.py:Class" from a script.

    Raises:
        EngineNotFoundError: no other process could import the class: it was made in a function, an interpreter or a
            notebook.
    """
    if not (isinstance(engine, type) and issubclass(engine, EngineCore)):
        raise EngineNotFoundError(f"an engine is a subclass of outboard.EngineCore, not {engine!r}")
    if "<locals>" in engine.__qualname__:
        raise EngineNotFoundError(f"{engine.__qualname__} is made inside a function: define it at the top of a module")
    if engine.__module__.startswith(_FILE_MODULE):
        return f"{sys.modules[engine.__module__].__file__}:{engine.__qualname__}"
    if engine.__module__ != "__main__":
        return f"{engine.__module__}:{engine.__qualname__}"
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):  # python -m package.module
        return f"{spec.name}:{engine.__qualname__}"
    path = getattr(main, "__file__", None)
    if path is not None and Path(path).is_file():  # it is "<stdin>" where the script comes from there
        return f"{Path(path).resolve()}:{engine.__qualname__}"
    raise EngineNotFoundError(f"{engine.__qualname__} has no file to import it from: define it in a module or a script")


_loading = threading.RLock()


def load_engine_class(reference: str) -> type[EngineCore]:
    """Imports the class of a reference.

    Raises:
        EngineNotFoundError: there is no such file, module or class, or it is no `EngineCore`. An exception that the
            module itself raises passes through.
    """
    target, _, name = reference.rpartition(":")
    if not target or (target.startswith(".") and not target.endswith(".py")):
        raise EngineNotFoundError(f"{reference!r} names no engine: give module:Class or path.py:Class")
    module = _load_file(Path(target)) if target.endswith(".py") else _load_module(target, reference)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, EngineCore)):
        there = sorted(
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, EngineCore) and not inspect.isabstract(value)
        )
        wrong = "is no subclass of outboard.EngineCore" if found is not None else "does not exist"
        raise EngineNotFoundError(f"{name} in {target} {wrong}; engines there: {', '.join(there) or 'none'}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise EngineNotFoundError(f"engine {reference} does not define {', '.join(missing)}")
    return found


def _load_module(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EngineNotFoundError(
                f"no module named {error.name!r}, which engine {reference!r} names; looked in {os.getcwd()} "  # noqa: PTH109
                "and the module search path"
            ) from error
        raise


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise EngineNotFoundError(f"no file {path} to load an engine from")
    with _loading:  # another thread must not find it half executed
        return _load_once(path)


def _load_once(path: Path) -> ModuleType:
    name = f"{_FILE_MODULE}{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what lies beside it, as if it were run
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class OptionInfo(msgspec.Struct, frozen=True):
    """One option of an engine: a parameter of its constructor.

    Attributes:
        name: its name.
        annotation: its type; `Any` where the constructor does not say.
        default: its default; `msgspec.NODEFAULT` where it must be given.
    """

    name: str
    annotation: Any
    default: Any

    def __str__(self) -> str:
        text = self.name
        if self.annotation is not Any:
            text += f": {inspect.formatannotation(self.annotation)}"
        return text if self.default is msgspec.NODEFAULT else f"{text} = {self.default!r}"


def engine_options(engine: type[EngineCore]) -> list[OptionInfo] | None:
    """The options of an engine, in order; None where its constructor takes any keyword."""
    parameters = inspect.signature(engine).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    try:
        hints = typing.get_type_hints(engine.__init__)
    except Exception:  # an annotation that only a type checker can resolve
        hints = {}
    return [
        OptionInfo(
            parameter.name,
            hints.get(parameter.name, Any),
            msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def bind_options(engine: type[EngineCore], options: dict[str, Any]) -> dict[str, Any]:
    """The constructor's keyword arguments for these options, converted to its annotations ("8" becomes 8 for an int).

    Raises:
        EngineOptionError: an option is unknown, missing or of the wrong type; the message names all there are.
    """
    known = engine_options(engine)
    if known is None:
        return dict(options)
    there = f"options of {engine.__name__}: {'; '.join(map(str, known)) or 'none'}"
    by_name = {option.name: option for option in known}
    if unknown := sorted(set(options) - set(by_name)):
        raise EngineOptionError(f"unknown option {', '.join(map(repr, unknown))}; {there}")
    missing = [option.name for option in known if option.default is msgspec.NODEFAULT and option.name not in options]
    if missing:
        raise EngineOptionError(f"option {', '.join(map(repr, missing))} is missing; {there}")
    bound = {}
    for name, value in options.items():
        annotation = by_name[name].annotation
        try:
            bound[name] = msgspec.convert(value, annotation, strict=False, dec_hook=_convert_other)
        except msgspec.ValidationError as error:
            raise EngineOptionError(f"option {name!r} cannot be {value!r}: {error}; {there}") from None
        except (
            TypeError,
            NotImplementedError,
        ):  # an annotation that msgspec has no conversion for: the constructor decides
            bound[name] = value
    return bound


def _convert_other(type_: type[Any], value: Any) -> Any:
    if issubclass(type_, PurePath):
        return type_(value)
    raise NotImplementedError
