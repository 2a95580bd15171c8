"""Encode arguments and results as JSON, for a checker and a candidate process.

A value becomes a JSON scalar, or an array whose first item names its type. Only exact builtin and standard-library
types are encoded; a subclass loses its overridden methods, because the decoder builds a genuine object of the base
type. Lists, dicts and other mutable containers are numbered in order of appearance, so shared references and cycles
survive and a callee can report which of its arguments it changed. Everything else goes through the hooks
`export(encoder, value)` and `import_(decoder, node)` of the process. Standard library only: this file also runs inside
the sandbox.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 150
_MAX_INT = 1 << 62
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type(None))
}
_TYPES["object"] = object
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_CONSTANTS = {"ellipsis": ..., "notimplemented": NotImplemented}
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_DTYPE = re.compile(r"[<>|=]([biufc])([0-9]{1,2})|[<>|=]([US])([0-9]{1,6})")
_SUBCLASSED: tuple[Any, ...] = (int, float, complex, str, bytes, bytearray, list, dict, set, frozenset, tuple)

_AS_IS = {bool, int, float, str, type(None)}

Hook = Callable[[Any, Any], Any]


class ValueRefused(Exception):
    """A value that cannot be encoded, or a message that is not the encoding of a value."""


class Encoded:
    """A value that was encoded before."""

    def __init__(self, node: list[Any]) -> None:
        self.node = node


class Encoder:
    """Encode values of one message. `export` encodes objects that are not plain; `known` holds numbered containers."""

    def __init__(self, export: Hook, known: Iterable[Any] = ()) -> None:
        self._export = export
        self.containers: list[Any] = list(known)
        self._numbers = {id(value): number for number, value in enumerate(self.containers)}
        self._depth = 0

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_MAX_INT < value < _MAX_INT else ["int", hex(value)]
        if kind is float:
            return value if value - value == 0 else ["float", repr(value)]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueRefused("nested too deeply")
        try:
            encode = _ENCODERS.get(kind)
            return self._other(value, kind) if encode is None else encode(self, value)
        finally:
            self._depth -= 1

    def items(self, values: Iterable[Any]) -> list[Any]:
        if type(values) in (list, tuple, set, frozenset, range) and len(values) > 8:  # type: ignore[arg-type]
            kinds = set(map(type, values))
            if kinds <= _AS_IS and _in_range(values, kinds):
                return list(values)
        return [self.encode(value) for value in values]

    def content(self, value: Any) -> Any:
        """Encode a numbered container itself instead of a reference to it."""
        encode = _ENCODERS.get(type(value))
        return self._array(value, sys.modules["numpy"], True) if encode is None else encode(self, value, True)

    def numbered(self, tag: str, value: Any, again: bool, parts: Callable[[], list[Any]]) -> list[Any]:
        number = self._numbers.get(id(value))
        if number is not None and not again:
            return ["same", number]
        if number is None:
            self._numbers[id(value)] = len(self.containers)
            self.containers.append(value)
        return [tag, *parts()]

    def _other(self, value: Any, kind: type) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._array(value, numpy)
        if kind.__module__.startswith("pathlib") and kind.__name__ in _PATHS:
            return ["path", kind.__name__, str(value)]
        if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
            return ["named", kind.__name__, list(fields), *self.items(tuple.__iter__(value))]
        if not isinstance(value, type):
            for base in _SUBCLASSED:
                if isinstance(value, base):
                    return self.encode(base.__new__(base, value) if base in _SUBCLASSED[:5] else _plain(base, value))
        elif _TYPES.get(kind_name := value.__name__) is value:
            return ["type", kind_name]
        for name, constant in _CONSTANTS.items():
            if value is constant:
                return ["constant", name]
        return self._export(self, value)

    def _array(self, value: Any, numpy: Any, again: bool = False) -> Any:
        if not _DTYPE.fullmatch(value.dtype.str):
            if isinstance(value, numpy.ndarray) and value.dtype == object:
                return ["objects", list(value.shape), *self.items(value.ravel().tolist())]
            return self._export(self, value)
        raw = value.tobytes().hex()
        if not isinstance(value, numpy.ndarray):
            return ["scalar", value.dtype.str, raw]
        return self.numbered("array", value, again, lambda: [value.dtype.str, list(value.shape), raw])


def _in_range(values: Any, kinds: set[type]) -> bool:
    """Whether JSON can represent all of these values; False, without a check, for numbers mixed with other types."""
    if int in kinds and float in kinds:
        return False
    if int in kinds and (len(kinds) > 1 or not -_MAX_INT < min(values) <= max(values) < _MAX_INT):
        return False
    return float not in kinds or (len(kinds) == 1 and all(map(math.isfinite, values)))


def _plain(base: Any, value: Any) -> Any:
    """The content of an instance of a subclass, read by the methods of the base."""
    plain = base()
    if base in (list, bytearray):
        plain.extend(base.__iter__(value))
    elif base in (dict, set):
        base.update(plain, value)
    else:
        plain = base(base.__iter__(value))
    return plain


def _pairs(encoder: Encoder, value: Any) -> list[Any]:
    return [encoder.encode(part) for pair in dict.items(value) for part in pair]


def _moment(value: datetime.datetime | datetime.time, *fields: int) -> list[Any] | None:
    key = getattr(value.tzinfo, "key", None)
    if type(value.tzinfo).__name__ == "ZoneInfo" and type(key) is str:
        return [*fields, value.fold, key]
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return None
    offset = value.utcoffset()
    return [*fields, value.fold, None if offset is None else offset // datetime.timedelta(microseconds=1)]


def _match(encoder: Encoder, value: Any) -> Any:
    if type(value.string) is not str:
        return encoder._export(encoder, value)
    return [
        "match",
        value.re.pattern,
        value.re.flags,
        value.string,
        value.pos,
        value.endpos,
        value.start(),
        value.end(),
    ]


def _pattern(encoder: Encoder, value: Any) -> Any:
    if type(value.pattern) is not str:
        return encoder._export(encoder, value)
    return ["pattern", value.pattern, value.flags]


def _datetime(encoder: Encoder, value: Any) -> Any:
    if type(value) is datetime.datetime:
        day = (value.year, value.month, value.day)
        fields = _moment(value, *day, value.hour, value.minute, value.second, value.microsecond)
        return encoder._export(encoder, value) if fields is None else ["datetime", *fields]
    fields = _moment(value, value.hour, value.minute, value.second, value.microsecond)
    return encoder._export(encoder, value) if fields is None else ["time", *fields]


_ENCODERS: dict[type, Callable[..., Any]] = {
    Encoded: lambda e, v: v.node,
    list: lambda e, v, again=False: e.numbered("list", v, again, lambda: e.items(v)),
    dict: lambda e, v, again=False: e.numbered("dict", v, again, lambda: _pairs(e, v)),
    set: lambda e, v, again=False: e.numbered("set", v, again, lambda: e.items(v)),
    bytearray: lambda e, v, again=False: e.numbered("bytearray", v, again, lambda: [v.decode("latin-1")]),
    collections.deque: lambda e, v, again=False: e.numbered("deque", v, again, lambda: [v.maxlen, *e.items(v)]),
    collections.Counter: lambda e, v, again=False: e.numbered("counter", v, again, lambda: _pairs(e, v)),
    collections.OrderedDict: lambda e, v, again=False: e.numbered(
        "ordered", v, again, lambda: [e.encode(part) for pair in v.items() for part in pair]
    ),
    collections.defaultdict: lambda e, v, again=False: e.numbered(
        "defaultdict", v, again, lambda: [e.encode(v.default_factory), *_pairs(e, v)]
    ),
    tuple: lambda e, v: ["tuple", *e.items(v)],
    frozenset: lambda e, v: ["frozenset", *e.items(v)],
    bytes: lambda e, v: ["bytes", v.decode("latin-1")],
    complex: lambda e, v: ["complex", repr(v.real), repr(v.imag)],
    range: lambda e, v: ["range", e.encode(v.start), e.encode(v.stop), e.encode(v.step)],
    slice: lambda e, v: ["slice", e.encode(v.start), e.encode(v.stop), e.encode(v.step)],
    decimal.Decimal: lambda e, v: ["decimal", str(v)],
    fractions.Fraction: lambda e, v: ["fraction", e.encode(v.numerator), e.encode(v.denominator)],
    datetime.datetime: _datetime,
    datetime.time: _datetime,
    datetime.date: lambda e, v: ["date", v.year, v.month, v.day],
    datetime.timedelta: lambda e, v: ["timedelta", v.days, v.seconds, v.microseconds],
    re.Pattern: _pattern,
    re.Match: _match,
    type({}.keys()): lambda e, v: ["keys", *e.items(v)],
    type({}.values()): lambda e, v: ["values", *e.items(v)],
    type({}.items()): lambda e, v: ["items", *e.items(v)],
}


class Decoder:
    """Decode values of one message into genuine objects; ValueRefused for anything that `Encoder` does not write."""

    def __init__(self, import_: Hook, known: Iterable[Any] = ()) -> None:
        self._import = import_
        self.containers: list[Any] = list(known)
        self._has_number = False

    def decode(self, node: Any) -> Any:
        if node is None or type(node) in (bool, str, int, float):
            return node
        if type(node) is not list or not node or type(node[0]) is not str:
            raise ValueRefused("not an encoded value")
        decode = _DECODERS.get(node[0])
        if decode is None:
            return self._import(self, node)
        try:
            return decode(self, node[1:])
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueRefused(f"not the encoding of a {node[0]}: {error}") from None

    def items(self, nodes: list[Any]) -> list[Any]:
        if len(nodes) > 8 and set(map(type, nodes)) <= _AS_IS:
            return nodes
        return [self.decode(node) for node in nodes]

    def replace(self, number: Any, node: Any) -> None:
        """Give a known container the content of another of its type."""
        if type(number) is not int or not 0 <= number < len(self.containers):
            raise ValueRefused("no such container")
        self._has_number = True
        old, new = self.containers[number], self.decode(node)
        self._has_number = False
        if type(old) is not type(new):
            raise ValueRefused("a container does not change its type")
        if isinstance(old, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set):
            old.clear()
            old.update(new)
        elif isinstance(old, collections.deque):
            old.clear()
            old.extend(new)
        elif old.shape == new.shape and old.dtype == new.dtype:
            old[...] = new
        else:
            raise ValueRefused("an array does not change its shape")

    def numbered(self, value: Any) -> Any:
        if self._has_number:
            self._has_number = False
        else:
            self.containers.append(value)
        return value


def _fill(decoder: Decoder, empty: Any, nodes: list[Any]) -> Any:
    value = decoder.numbered(empty)
    if isinstance(value, dict):
        for key, item in zip(nodes[::2], nodes[1::2], strict=True):
            dict.__setitem__(value, decoder.decode(key), decoder.decode(item))
    elif isinstance(value, set):
        value.update(decoder.items(nodes))
    else:
        value.extend(decoder.items(nodes))
    return value


def _ordered(decoder: Decoder, nodes: list[Any]) -> Any:
    value: Any = decoder.numbered(collections.OrderedDict())
    for key, item in zip(nodes[::2], nodes[1::2], strict=True):
        value[decoder.decode(key)] = decoder.decode(item)
    return value


def _default(decoder: Decoder, nodes: list[Any]) -> Any:
    value: Any = decoder.numbered(collections.defaultdict())
    value.default_factory = decoder.decode(nodes[0])
    if value.default_factory is not None and not callable(value.default_factory):
        raise ValueRefused("default_factory is not callable")
    for key, item in zip(nodes[1::2], nodes[2::2], strict=True):
        value[decoder.decode(key)] = decoder.decode(item)
    return value


def _same(decoder: Decoder, nodes: list[Any]) -> Any:
    (number,) = nodes
    if type(number) is not int or number < 0:
        raise ValueRefused("not the number of a container")
    return decoder.containers[number]


def _named(decoder: Decoder, nodes: list[Any]) -> Any:
    name, fields, *values = nodes
    if not all(type(word) is str and _IDENTIFIER.fullmatch(word) for word in (name, *fields)) or len(fields) > 64:
        raise ValueRefused("not the fields of a named tuple")
    kind: Any = _named_type(name, tuple(fields))
    return kind(*decoder.items(values))


_named_types: dict[tuple[str, tuple[str, ...]], Any] = {}


def _named_type(name: str, fields: tuple[str, ...]) -> Any:
    if (name, fields) not in _named_types:
        _named_types[name, fields] = collections.namedtuple(name, fields)
    return _named_types[name, fields]


def _require_ints(values: list[Any]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise ValueRefused("not an integer")
    return values


def _text(values: list[Any], max_length: int = 1 << 24) -> str:
    (text,) = values
    if type(text) is not str or len(text) > max_length:
        raise ValueRefused("not a text, or too long")
    return text


def _zone(microseconds: Any) -> datetime.tzinfo | None:
    if microseconds is None:
        return None
    if type(microseconds) is str:
        import zoneinfo

        return zoneinfo.ZoneInfo(microseconds)
    return datetime.timezone(datetime.timedelta(microseconds=_require_ints([microseconds])[0]))


def _array(decoder: Decoder, nodes: list[Any], scalar: bool = False) -> Any:
    import numpy

    dtype, *shape, raw = nodes
    match = _DTYPE.fullmatch(_text([dtype], 16))
    if match is None or (match[4] or match[2]) == "0":
        raise ValueRefused("not the type of an array")
    values = numpy.frombuffer(bytes.fromhex(_text([raw])), dtype=dtype)
    if scalar:
        return values.reshape(())[()]
    (sizes,) = shape
    return decoder.numbered(values.reshape(tuple(_require_ints(sizes))).copy())


def _objects(decoder: Decoder, nodes: list[Any]) -> Any:
    import numpy

    shape, *items = nodes
    values = numpy.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        values[index] = decoder.decode(item)
    return values.reshape(tuple(_require_ints(shape)))


def _rebuilt_match(nodes: list[Any]) -> Any:
    """Repeat the search that found the encoded match."""
    pattern, flags, text, pos, endpos, start, end = nodes
    compiled = re.compile(_text([pattern], 1 << 16), *_require_ints([flags]))
    for search in (compiled.match, compiled.fullmatch, compiled.search):
        match = search(_text([text]), *_require_ints([pos, endpos]))
        if match is not None and match.span() == (start, end):
            return match
    match = compiled.match(text, *_require_ints([start, endpos]))  # one of `finditer`
    if match is None or match.span() != (start, end):
        raise ValueRefused("not a match")
    return match


def _path(nodes: list[Any]) -> Any:
    import pathlib

    name, text = nodes
    if name not in _PATHS:
        raise ValueRefused("not a path")
    return getattr(pathlib, name)(_text([text], 1 << 16))


def _typed(nodes: list[Any]) -> Any:
    import array

    code, *items = nodes
    return array.array(_text([code], 1), items)


def _decimal(text: str) -> decimal.Decimal:
    return decimal.Decimal(text, decimal.Context(traps=[decimal.InvalidOperation]))


_DECODERS: dict[str, Callable[[Decoder, list[Any]], Any]] = {
    "int": lambda d, n: int(_text(n, 1 << 22), 16),
    "float": lambda d, n: {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}[_text(n, 4)],
    "list": lambda d, n: _fill(d, [], n),
    "dict": lambda d, n: _fill(d, {}, n),
    "set": lambda d, n: _fill(d, set(), n),
    "bytearray": lambda d, n: d.numbered(bytearray(_text(n).encode("latin-1"))),
    "deque": lambda d, n: _fill(d, collections.deque(maxlen=n[0]), n[1:]),
    "counter": lambda d, n: _fill(d, collections.Counter(), n),
    "ordered": _ordered,
    "defaultdict": _default,
    "same": _same,
    "tuple": lambda d, n: tuple(d.items(n)),
    "frozenset": lambda d, n: frozenset(d.items(n)),
    "bytes": lambda d, n: _text(n).encode("latin-1"),
    "complex": lambda d, n: complex(float(_text(n[:1], 64)), float(_text(n[1:], 64))),
    "range": lambda d, n: range(*_require_ints(d.items(n))),
    "slice": lambda d, n: slice(*d.items(n)),
    "decimal": lambda d, n: _decimal(_text(n, 1 << 16)),
    "fraction": lambda d, n: fractions.Fraction(*_require_ints(d.items(n))),
    "datetime": lambda d, n: datetime.datetime(*_require_ints(n[:7]), tzinfo=_zone(n[8]), fold=n[7]),  # type: ignore[arg-type, misc]
    "time": lambda d, n: datetime.time(*_require_ints(n[:4]), tzinfo=_zone(n[5]), fold=n[4]),  # type: ignore[arg-type, misc]
    "date": lambda d, n: datetime.date(*_require_ints(n)),
    "timedelta": lambda d, n: datetime.timedelta(*_require_ints(n)),
    "keys": lambda d, n: dict.fromkeys(d.items(n)).keys(),
    "values": lambda d, n: dict(enumerate(d.items(n))).values(),
    "items": lambda d, n: dict(d.items(n)).items(),
    "pattern": lambda d, n: re.compile(_text(n[:1], 1 << 16), *_require_ints(n[1:])),
    "match": lambda d, n: _rebuilt_match(n),
    "path": lambda d, n: _path(n),
    "typed": lambda d, n: _typed(n),
    "iterator": lambda d, n: iter(d.items(n)),
    "named": _named,
    "array": _array,
    "objects": _objects,
    "scalar": lambda d, n: _array(d, n, scalar=True),
    "type": lambda d, n: _TYPES[_text(n, 16)],
    "constant": lambda d, n: _CONSTANTS[_text(n, 16)],
}


def changed(value: Any, old: Any) -> bool:
    """Whether a container holds other objects than before, or the same in another order."""
    if isinstance(value, dict):
        return not (_identical(value.keys(), old.keys()) and _identical(value.values(), old.values()))
    if isinstance(value, list | collections.deque | set):
        return not _identical(value, old)
    return bytes(value) != bytes(old)


def _identical(values: Any, old: Any) -> bool:
    return len(values) == len(old) and all(map(operator.is_, values, old))
