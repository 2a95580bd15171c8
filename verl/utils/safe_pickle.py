"""Read pickles as plain data: nothing named in them is imported or called.

Objects of classes become inert `Record`s, and only the functions that the caller passes as `known` are called. A pickle
is checked before it is read: opcodes that no file of torch contains are refused, and so is whatever lets a small file
take much memory (memo indices beyond the number of entries, long numbers). Memory is then at most about a hundred times
the size of the pickle.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

__all__ = ["Record", "load_records"]

Known = Mapping[tuple[str, str], Any]
"""What a global of a pickle stands for, by module and name: plain data, an immutable type, or a function."""

_MAX_ARGUMENTS = 64
_MAX_NAMES = 512
_NO_CODE = "nothing in it was executed"


class _FrozenType(type):
    """A pickle can set attributes of anything it names, also of a class."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a class")


class Record(metaclass=_FrozenType):
    """An object of a class that is not imported."""

    kind: ClassVar[str] = ""
    """The name of the class."""
    args: tuple[Any, ...]
    fields: Mapping[str, Any]
    state: Any
    """Where it is no fields."""

    def __new__(cls, *args: Any, **fields: Any) -> Record:
        # Copies of arguments that the memo repeats would take memory without limit.
        if len(args) + len(fields) > _MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"{cls.kind} has {len(args) + len(fields)} arguments")
        record = object.__new__(cls)
        record.args, record.fields, record.state = args, fields, None
        return record

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None and isinstance(state[1], dict):
            state = state[1]  # of a class with slots
        if isinstance(state, dict):
            self.fields = state
        else:
            self.state = state


def load_records(
    data: bytes,
    known: Known,
    persistent_load: Callable[[Any], Any] | None = None,
    packages: Collection[str] | None = None,
) -> Any:
    """The object in a pickle. ValueError where it is damaged or names what it must not.

    `known` functions are called with the arguments in the pickle. Objects of other classes are `Record`s; those of
    packages that are not among `packages` (None: all) are refused.
    """
    try:
        _check_opcodes(data)
        return _Unpickler(data, known, persistent_load, packages).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
    ) as error:
        raise ValueError(f"the pickle is damaged or not of torch ({error}); {_NO_CODE}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        known: Known,
        persistent_load: Callable[[Any], Any] | None,
        packages: Collection[str] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names: dict[tuple[str, str], Any] = {
            name: _Function(value) if callable(value) and not isinstance(value, type) else value
            for name, value in known.items()
        }
        self._packages, self._persistent = packages, persistent_load
        for module in ("builtins", "__builtin__"):  # a class inside a class
            self._names[module, "getattr"] = _Function(self._inner_class)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            pass
        if self._packages is not None and module.partition(".")[0] not in self._packages:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}")
        return self._record_type(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it contains a tensor, where none belongs")
        return self._persistent(pid)

    def _record_type(self, module: str, name: str) -> Any:
        if len(self._names) > _MAX_NAMES:
            raise pickle.UnpicklingError(f"it names more than {_MAX_NAMES} classes")
        kind = f"{module}.{name}"
        return self._names.setdefault((module, name), _FrozenType(name, (Record,), {"kind": kind}))

    def _inner_class(self, outer: Any, name: Any) -> Any:
        if not (isinstance(outer, _FrozenType) and isinstance(name, str)):
            raise pickle.UnpicklingError("it reads an attribute")
        module, _, first = outer.kind.rpartition(".")  # type: ignore[attr-defined]
        return self._names.get((module, f"{first}.{name}")) or self._record_type(module, f"{first}.{name}")


class _Function:
    """A function that a pickle may call and cannot change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        if len(args) > _MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"a call has {len(args)} arguments")
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a function")


# Neither in files of torch nor in pickles of dataclasses: code by number, objects outside the file, protocols 0 and 1.
_REFUSED = {
    *("INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER"),
    *("INT", "LONG", "LONG4", "STRING", "UNICODE", "FLOAT", "GET", "PUT"),
}
_ACCEPTED = [opcode for opcode in pickletools.opcodes if opcode.name not in _REFUSED]
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_FIXED = {ord(each.code): each.arg.n if each.arg else 0 for each in _ACCEPTED if each.arg is None or each.arg.n >= 0}
_PREFIXED = {
    ord(each.code): _LENGTH_BYTES[each.arg.n]
    for each in _ACCEPTED
    if each.arg is not None and each.arg.n in _LENGTH_BYTES
}
_GLOBAL, _STOP, _MEMOIZE = b"c"[0], b"."[0], b"\x94"[0]
_MEMO_PUTS = {b"q"[0]: 1, b"r"[0]: 4}


def _check_opcodes(data: bytes) -> None:
    """Raise UnpicklingError for a refused opcode, a length beyond the end, or a memo index that leaves gaps."""
    position, stored = 0, 0
    while position < len(data):
        code = data[position]
        position += 1
        if code == _MEMOIZE:
            stored += 1
        elif code in _MEMO_PUTS:
            index = int.from_bytes(data[position : position + _MEMO_PUTS[code]], "little")
            if index > stored + 1:  # pickle keeps an array of this length
                raise pickle.UnpicklingError(f"memo entry {index} follows {stored} entries")
            stored = max(stored, index + 1)
        elif code == _STOP:
            return
        if code in _FIXED:
            position += _FIXED[code]
        elif code in _PREFIXED:
            width = _PREFIXED[code]
            position += width + int.from_bytes(data[position : position + width], "little")
        elif code == _GLOBAL:
            position = _after_line(data, _after_line(data, position))
        else:
            raise pickle.UnpicklingError(f"torch writes no opcode {code:#04x}")
    raise pickle.UnpicklingError("it is truncated")


def _after_line(data: bytes, position: int) -> int:
    end = data.find(b"\n", position)
    if end < 0:
        raise pickle.UnpicklingError("it is truncated")
    return end + 1
