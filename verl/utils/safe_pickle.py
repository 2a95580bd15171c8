"""Read pickles as plain data: nothing named in them is imported or called.

Objects of classes become inert `Record`s, and only the functions that the caller passes as `known` are called. A pickle
is checked before it is read: it is rejected if it has opcodes that torch does not write, or if a small file could take
much memory (memo indices beyond the number of entries, long numbers). Memory is then at most about a hundred times the
size of the pickle.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import stat
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO, ClassVar

__all__ = ["Record", "load_records", "open_regular", "read_regular"]

Known = Mapping[tuple[str, str], Any]
"""Replacement of a global of a pickle by (module, name): plain data, an immutable type, or a function."""

_MAX_ARGUMENTS = 64
_MAX_NAMES = 512
_MAX_DEPTH = 1000
_MAX_BYTES = 1 << 30


class _FrozenType(type):
    """A class whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a class")


class Record(metaclass=_FrozenType):
    """An object of a class that is not imported."""

    kind: ClassVar[str] = ""
    """The name of the class."""
    args: tuple[Any, ...]
    fields: Mapping[str, Any]
    state: Any
    """Its state, if that is not a dict of fields."""

    def __new__(cls, *args: Any, **fields: Any) -> Record:
        # A pickle can repeat arguments by memo references: their copies could take any amount of memory.
        if len(args) + len(fields) > _MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"{cls.kind} has {len(args) + len(fields)} arguments")
        record = object.__new__(cls)
        record.args, record.fields, record.state = args, fields, None
        return record

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None and isinstance(state[1], dict):
            state = state[1]  # a class with __slots__
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
    """Return the object in a pickle. ValueError: it is damaged or refers to something that is not allowed.

    `known` functions are called with the arguments in the pickle. Objects of other classes are `Record`s; classes of
    packages that are not in `packages` (None: all) are rejected.
    """
    try:
        _check_opcodes(data)
        unpickler = _Unpickler(data, known, persistent_load, packages)
        try:
            return unpickler.load()
        finally:
            unpickler.break_cycle()
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
    ) as error:
        raise ValueError(f"{error}; nothing in it was executed") from error


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file or a link to one. ValueError for a device, a pipe or a folder, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file of at most 1 GiB."""
    with open_regular(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path}: is larger than {_MAX_BYTES} bytes")
    return data


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

    def break_cycle(self) -> None:
        """Remove the reference of this object to itself, which would keep loaded tensors until a garbage collection."""
        self._names.clear()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            pass
        if self._packages is not None and module.partition(".")[0] not in self._packages:
            raise pickle.UnpicklingError(f"the pickle refers to {module[:80]}.{name[:80]}, which is not allowed")
        return self._record_type(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it contains a tensor, which is not allowed here")
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
    """A function that a pickle may call but not change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        if len(args) > _MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"a call has {len(args)} arguments")
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a function")


# Opcodes that neither files of torch nor pickles of dataclasses contain: extension codes, external objects, protocols 0
# and 1, and opcodes that no pickler writes.
_REJECTED = {
    *("INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER", "INT", "LONG", "LONG4"),
    *("STRING", "UNICODE", "FLOAT", "GET", "PUT", "LIST", "DICT", "DUP", "POP", "POP_MARK"),
    # One byte of EMPTY_SET takes 216 bytes of memory.
    *("EMPTY_SET", "ADDITEMS", "FROZENSET"),
}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes if opcode.name not in _REJECTED}
_NAMES = {opcode.name: code for code, opcode in _OPCODES.items()}
_GLOBAL, _MARK, _STOP, _MEMOIZE = (_NAMES[name] for name in ("GLOBAL", "MARK", "STOP", "MEMOIZE"))
_PUTS = (_MEMOIZE, _NAMES["BINPUT"], _NAMES["LONG_BINPUT"])
_GETS = (_NAMES["BINGET"], _NAMES["LONG_BINGET"])
_TUPLES = tuple(code for name, code in _NAMES.items() if name.startswith(("TUPLE", "FROZENSET")))
# Size of an opcode's argument in bytes; negative: variable (a constant of `pickletools`).
_ARGUMENT_BYTES = {code: opcode.arg.n if opcode.arg else 0 for code, opcode in _OPCODES.items()}
# For opcodes whose argument begins with its length: size of that length in bytes.
_PREFIX_BYTES = {code: _LENGTH_BYTES[size] for code, size in _ARGUMENT_BYTES.items() if size in _LENGTH_BYTES}
# For opcodes that pop the mark and all values above it: number of values popped below the mark.
_POPPED_BELOW_MARK = {
    code: opcode.stack_before.index(pickletools.markobject)
    for code, opcode in _OPCODES.items()
    if pickletools.markobject in opcode.stack_before
}
# For the other opcodes: number of values popped from the stack.
_POPPED = {code: len(opcode.stack_before) for code, opcode in _OPCODES.items()}
# Constants: they only add a value to the stack, and are most of a pickle.
_CONSTANTS = {
    code: size
    for code, size in _ARGUMENT_BYTES.items()
    if size >= 0 and not _POPPED[code] and code not in (*_GETS, *_PUTS, _MARK) and _OPCODES[code].stack_after
}


def _check_opcodes(data: bytes) -> None:
    """Raise UnpicklingError for a rejected opcode, a memo index that leaves gaps, or tuples nested too deeply.

    `pickle` allocates an array up to the largest index, and hashing deep tuples overflows its stack.
    """
    position, end = 0, len(data)
    stack: list[int] = []  # nesting depth of tuples in each value
    marks: list[int] = []
    memo: list[int] = []
    while position < end:
        code = data[position]
        position += 1
        if code in _CONSTANTS:
            position += _CONSTANTS[code]
            stack.append(0)
        elif code in _PREFIX_BYTES:
            width = _PREFIX_BYTES[code]
            position += width + int.from_bytes(data[position : position + width], "little")
            stack.append(0)
        elif code in _PUTS:
            width = _ARGUMENT_BYTES[code]
            index = int.from_bytes(data[position : position + width], "little") if width else len(memo)
            position += width
            if index > len(memo):
                raise pickle.UnpicklingError(f"memo entry {index} follows {len(memo)} entries")
            memo[index : index + 1] = [stack[-1]]
        elif code in _GETS:
            width = _ARGUMENT_BYTES[code]
            stack.append(memo[int.from_bytes(data[position : position + width], "little")])
            position += width
        elif code == _MARK:
            marks.append(len(stack))
        elif code == _STOP:
            return
        elif code == _GLOBAL:
            position = _after_line(data, _after_line(data, position))
            stack.append(0)
        elif code in _OPCODES:
            position += _ARGUMENT_BYTES[code]
            _apply(code, stack, marks)
        else:
            raise pickle.UnpicklingError(f"the pickle contains opcode {code:#04x}, which is not allowed")
    raise pickle.UnpicklingError("it is truncated")


def _apply(code: int, stack: list[int], marks: list[int]) -> None:
    """Pop the arguments of an opcode from the stack and push its result."""
    first = marks.pop() - _POPPED_BELOW_MARK[code] if code in _POPPED_BELOW_MARK else len(stack) - _POPPED[code]
    if first < 0:
        raise pickle.UnpicklingError("its stack is empty")
    if not _OPCODES[code].stack_after:
        return  # PROTO and FRAME
    depth = max(stack[first:], default=0) + (code in _TUPLES)
    if depth > _MAX_DEPTH:
        raise pickle.UnpicklingError("it is nested too deeply")
    stack[first:] = [depth]


def _after_line(data: bytes, position: int) -> int:
    end = data.find(b"\n", position)
    if end < 0:
        raise pickle.UnpicklingError("it is truncated")
    return end + 1
