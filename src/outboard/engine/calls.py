"""Values of utility calls take the types that the method's annotations name: dataclasses, structs, tuples, sets.

On the wire there are only msgpack values and arrays; a dataclass travels as a map. The engine core converts arguments
by the annotations of the parameters, the client results by that of the return value. What is not annotated stays as it
is.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from outboard.errors import UtilityError

__all__ = ["convert", "convert_arguments", "has_typed_result", "return_type"]

# What arrives as it was sent, and packages whose arrays do.
_AS_THEY_ARE = {bool, int, float, str, bytes, list, dict, type(None), types.UnionType}
_WITH_BUFFERS = {"numpy", "torch"}


def convert(value: Any, wanted: Any) -> Any:
    """`value` as an instance of the type `wanted`; as it is where msgspec knows no conversion to that.

    Raises:
        msgspec.ValidationError: it does not fit.
    """
    if wanted is Any or wanted is inspect.Parameter.empty:
        return value
    try:
        return msgspec.convert(value, wanted, dec_hook=_keep)
    except (TypeError, NotImplementedError):  # an annotation that is no type of data
        return value


def convert_arguments(
    method: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, converted to the method's annotations.

    Raises:
        UtilityError: an argument does not fit; names it. Wrong numbers and names of arguments are left to the call.
    """
    if not args and not kwargs:
        return args, kwargs
    function = getattr(method, "__func__", method)
    hints = _hints(function)
    if not hints:
        return args, kwargs
    # Of the plain function, so that it can be kept; `self` is whatever comes first, and is taken off again below.
    leading = () if function is method else (None,)
    try:
        bound = _signature(function).bind(*leading, *args, **kwargs)
    except TypeError:
        return args, kwargs
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            bound.arguments[name] = convert(value, hints[name])
        except msgspec.ValidationError as error:
            wanted = inspect.formatannotation(hints[name])
            raise UtilityError(f"argument {name!r} of {method.__name__!r} does not fit {wanted}: {error}") from None
    return list(bound.args[len(leading) :]), bound.kwargs


def return_type(method: Callable[..., Any]) -> Any:
    """What a method's annotation says that it returns; the result's type where that is a future. `Any`: not said."""
    wanted = _hints(getattr(method, "__func__", method)).get("return", Any)
    origin = typing.get_origin(wanted)
    if inspect.isclass(origin) and origin.__name__ == "Future":
        (wanted,) = typing.get_args(wanted)
    return wanted


def has_typed_result(method: Callable[..., Any]) -> bool:
    """Whether a method's result needs converting on arrival."""
    return _needs_conversion(return_type(method))


def _needs_conversion(wanted: Any) -> bool:
    arguments = typing.get_args(wanted)
    cls = typing.get_origin(wanted) or wanted
    if inspect.isclass(cls) and cls not in _AS_THEY_ARE and cls.__module__.partition(".")[0] not in _WITH_BUFFERS:
        return True
    return any(map(_needs_conversion, arguments))


_signature = functools.lru_cache(maxsize=256)(inspect.signature)


@functools.lru_cache(maxsize=256)
def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(method)
    except Exception:  # an annotation that only a type checker can resolve
        return {}


def _keep(wanted: type[Any], value: Any) -> Any:
    if isinstance(value, wanted):
        return value
    raise NotImplementedError
