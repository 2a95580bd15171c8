"""The candidate process: executes a solution and calls its functions for a checker in another process.

The checker trusts nothing in this process: the solution shares its interpreter and may change all of it. The solution
cannot reach the test, which stays in the checker. Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import importlib
import io
import itertools
import sys
import time
from types import CodeType
from typing import Any

from verl.utils.reward_score.code_tests.channel import Channel, ChannelClosed, ProtocolError
from verl.utils.reward_score.code_tests.values import Decoder, Encoder, ValueRefused, changed

# Special methods that a checker may use on an object of the candidate: none of them takes an operand to compare with.
_SPECIAL_METHODS = (
    "__call__ __len__ __iter__ __next__ __getitem__ __setitem__ __delitem__ __str__ __repr__ __int__ "
    "__float__ __index__ __complex__ __bytes__ __reversed__"
)
FORWARDED = tuple(_SPECIAL_METHODS.split())
STANDARD_MODULES = sys.stdlib_module_names | {"numpy"}
_MAX_OUTPUT = 1 << 20
_BATCH_SECONDS = 0.01  # a batch of a slow iterator ends early
_MISSING: Any = type("missing", (), {})()


def serve_candidate(descriptor: int, protected: bool, solution: CodeType, names: dict[str, Any]) -> None:
    """Execute `solution` in `names`, then serve the checker at `descriptor` until it closes the channel.

    `protected`, sent before the solution runs: whether this process is unable to read the memory of the checker.
    """
    candidate = _Candidate(descriptor, names, solution)
    candidate.channel.send(["hello", protected])
    try:
        exec(solution, names)
    except BaseException as error:  # noqa: BLE001 - reported to the checker
        candidate.failure = error
    try:
        candidate.channel.serve_forever()
    except (ChannelClosed, ProtocolError):
        return


class CheckerObject:
    """An object of the checker that the candidate can hold and pass back."""

    def __init__(self, number: int) -> None:
        self._checker_number = number


class CheckerFunction(CheckerObject):
    """A function of the checker; calls are executed in the checker process."""

    def __init__(self, number: int, name: str, doc: str | None, candidate: _Candidate) -> None:
        super().__init__(number)
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self._candidate = candidate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._candidate.call_checker(self._checker_number, args, kwargs)


class _Candidate:
    def __init__(self, descriptor: int, names: dict[str, Any], solution: CodeType) -> None:
        self.channel = Channel(descriptor, self._serve)
        self.failure: BaseException | None = None
        self._names = names
        self._solution = solution
        self._before = dict(names)
        self._objects: list[Any] = []
        self._ids: dict[int, int] = {}
        self._iterator_errors: dict[int, Exception] = {}
        self._checker_objects: dict[int, CheckerObject] = {}
        self._output = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self._output, "utf-8", errors="replace", write_through=True)

    # -- requests of the checker ---------------------------------------------------------------------------------

    def _serve(self, operation: str, parts: list[Any]) -> list[Any]:
        decoder = Decoder(self._import)
        before: list[Any] = []
        encoder: Encoder | None = None
        try:
            action, arguments = getattr(self, f"_on_{operation}"), [decoder.decode(part) for part in parts]
            before = [value.copy() for value in decoder.containers]
            value = action(*arguments)
            encoder = Encoder(self._export, decoder.containers)
            reply = ["value", encoder.encode(value)]
        except (ChannelClosed, ProtocolError):
            raise
        except ValueRefused as error:
            encoder = Encoder(self._export, decoder.containers)
            reply = ["raise", self._exception(encoder, TypeError(f"the result cannot leave its process: {error}"))]
        except BaseException as error:  # noqa: BLE001 - raised again in the checker
            encoder = Encoder(self._export, decoder.containers)
            reply = ["raise", self._exception(encoder, error)]
        updates = [
            [number, encoder.content(value)]
            for number, (value, old) in enumerate(zip(decoder.containers, before, strict=False))
            if changed(value, old)
        ]
        return [*reply, updates, self._take_output()]

    def _on_names(self, names: list[str], definitions: str) -> Any:
        if self.failure is not None:
            raise self.failure
        if definitions:
            exec(compile(definitions, "setup.py", "exec"), self._names)
        values = [self._names[name] if self._defines(name) else _MISSING for name in names]
        return [_Object(value) if callable(value) else value for value in values]

    def _defines(self, name: str) -> bool:
        return defines(self._solution, self._names, self._before, name)

    def _on_call(self, target: Any, arguments: list[Any], keywords: dict[str, Any], as_object: bool) -> Any:
        value = target(*arguments, **keywords)
        constructed = isinstance(target, type) or as_object
        reference = constructed and not _is_standard(type(value)) and not isinstance(value, BaseException | tuple)
        return _Object(value) if reference else value

    def _on_truth(self, target: Any) -> bool:
        return bool(target)

    def _on_next(self, iterator: Any, count: int) -> list[Any]:
        """Up to `count` items; an error ends the batch and is raised by the next request."""
        items: list[Any] = []
        end = time.monotonic() + _BATCH_SECONDS
        try:
            for item in itertools.islice(iterator, count):
                items.append(item)
                if time.monotonic() > end:
                    return items
        except Exception as error:
            if not items:
                raise
            self._iterator_errors[id(iterator)] = error
            return items
        if not items and id(iterator) in self._iterator_errors:
            raise self._iterator_errors.pop(id(iterator))
        return items

    def _on_send(self, iterator: Any, method: str, value: Any) -> list[Any]:
        """`send`, `throw` or `close` of a generator; no item if it has ended."""
        try:
            result = getattr(iterator, method)(*([] if method == "close" else [value]))
        except StopIteration:
            return []
        return [] if method == "close" else [result]

    def _on_get(self, target: Any, name: str) -> Any:
        return getattr(target, name)

    def _on_set(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)

    def _on_delete(self, target: Any, name: str) -> None:
        delattr(target, name)

    def _on_special(self, target: Any, name: str, arguments: list[Any]) -> Any:
        return getattr(type(target), name)(target, *arguments)

    def _on_describe(self, kind: type) -> list[Any]:
        special = [name for name in FORWARDED if getattr(kind, name, None) is not None]
        return [kind.__name__, kind.__module__, list(map(_Base, kind.__bases__)), special]

    # -- calls to the checker ------------------------------------------------------------------------------------

    def call_checker(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        encoder = Encoder(self._export)
        parts = [number, encoder.items(args), [[name, encoder.encode(value)] for name, value in kwargs.items()]]
        outcome, node, updates = self.channel.request("call", *parts, self._take_output())
        decoder = Decoder(self._import, encoder.containers)
        value = decoder.decode(node)
        for number_, content in updates:
            decoder.replace(number_, content)
        if outcome == "raise":
            raise value
        return value

    # -- objects -------------------------------------------------------------------------------------------------

    def _number(self, value: Any) -> int:
        if id(value) not in self._ids:
            self._ids[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._ids[id(value)]

    def _export(self, encoder: Encoder, value: Any) -> Any:
        if value is _MISSING:
            return ["missing"]
        if isinstance(value, _Object):
            return self._reference(value.value)
        if isinstance(value, _Base):
            return self._class(value.value)
        if isinstance(value, CheckerObject):
            return ["checker", value._checker_number]
        if isinstance(value, BaseException):
            return self._exception(encoder, value)
        if type(value).__module__ == "array":
            return ["typed", value.typecode, *value.tolist()]
        return self._reference(value)

    def _reference(self, value: Any) -> list[Any]:
        if isinstance(value, type):
            return ["class", self._number(value)]
        if hasattr(type(value), "__next__") and _is_standard(type(value)):
            return ["generator", self._number(value)]
        return ["object", self._number(value), self._number(type(value))]

    def _class(self, kind: type) -> list[Any]:
        if _is_standard(kind):
            builtin = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
            return ["standard", kind.__module__, kind.__name__, builtin]
        return ["class", self._number(kind)]

    def _exception(self, encoder: Encoder, error: BaseException) -> list[Any]:
        name = self._class(type(error))
        attributes = {key: value for key, value in vars(error).items() if not key.startswith("__")}
        try:
            return ["exception", name, encoder.encode(error.args), encoder.encode(attributes), str(error)[:10000]]
        except Exception:  # noqa: BLE001 - a solution's exception may contain values that cannot be encoded
            return ["exception", name, ["tuple"], ["dict"], ""]

    def _import(self, decoder: Decoder, node: list[Any]) -> Any:
        if node[0] in ("class", "object"):
            return self._objects[node[1]]
        if node[0] == "checker":
            number, name, doc = node[1:]
            if number not in self._checker_objects:
                self._checker_objects[number] = CheckerFunction(number, name, doc, self)
            return self._checker_objects[number]
        if node[0] == "standard":
            return getattr(importlib.import_module(node[1]), node[2])
        if node[0] == "exception":
            return decoder.decode(node[1])(*decoder.decode(node[2]))
        raise ProtocolError("not a value")

    def _take_output(self) -> str:
        if not self._output.tell():
            return ""
        text = self._output.getvalue()[:_MAX_OUTPUT].decode(errors="replace")
        self._output.seek(0)
        self._output.truncate()
        return text


def defines(solution: CodeType, names: dict[str, Any], before: dict[str, Any], name: str) -> bool:
    """Whether a solution binds a name.

    `before`: the names that existed before the solution ran; the solution may bind one of them to the same value.
    """
    if name not in names:
        return False
    return name not in before or names[name] is not before[name] or _stores(solution, name)


def _stores(code: CodeType, name: str) -> bool:
    import dis

    if ("*",) in code.co_consts:  # from math import *
        return True
    if any(
        step.argval == name and step.opname in ("STORE_NAME", "STORE_GLOBAL") for step in dis.get_instructions(code)
    ):
        return True
    return any(_stores(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _is_standard(kind: type) -> bool:
    return kind.__module__.split(".")[0] in STANDARD_MODULES


class _Object:
    """A value that is sent as a reference even where it could be sent as data."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Base:
    """A class, sent by its name if it belongs to the standard library, otherwise as a reference."""

    def __init__(self, value: type) -> None:
        self.value = value
