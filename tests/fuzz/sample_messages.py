"""A valid message of any struct of the protocol, made from its type: a new one is fuzzed as soon as it exists."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import msgspec
from msgspec import inspect

import outboard.protocol

__all__ = ["encoded", "structs"]


def structs() -> list[type[msgspec.Struct]]:
    """All structs of the protocol's modules that travel as arrays."""
    found = {}
    for module in pkgutil.iter_modules(outboard.protocol.__path__, "outboard.protocol."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__struct_config__.array_like:
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return [found[name] for name in sorted(found)]


def encoded(struct: type[msgspec.Struct]) -> list[bytes]:
    """Two messages: with all fields set, and with only those that have no default."""
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return [msgspec.msgpack.encode(_struct(kind, full)) for full in (True, False)]


def _struct(kind: inspect.StructType, full: bool) -> Any:
    fields = [field for field in kind.fields if field.required or full]
    tag = [] if kind.tag is None else [kind.tag]
    if kind.array_like:
        return tag + [_value(field.type, full) for field in fields]
    return {field.encode_name: _value(field.type, full) for field in fields}


def _value(kind: inspect.Type, full: bool) -> Any:
    if isinstance(kind, inspect.StructType):
        return _struct(kind, full)
    if isinstance(kind, inspect.UnionType):
        return _value(next(option for option in kind.types if not isinstance(option, inspect.NoneType)), full)
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        return [_value(kind.item_type, full)]
    if isinstance(kind, inspect.TupleType):
        return [_value(item, full) for item in kind.item_types]
    if isinstance(kind, inspect.DictType):
        return {_value(kind.key_type, full): _value(kind.value_type, full)}
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.EnumType):
        return next(iter(kind.cls)).value
    return _PLAIN[type(kind)]


_PLAIN: dict[type, Any] = {
    inspect.AnyType: ["x", 1, None, {"k": [2.5, b"y"]}],
    inspect.NoneType: None,
    inspect.BoolType: True,
    inspect.IntType: 1,
    inspect.FloatType: 1.0,
    inspect.StrType: "text",
    inspect.BytesType: b"\1\0\0\0\2\0\0\0",
    inspect.RawType: msgspec.Raw(b"\x01"),
}
