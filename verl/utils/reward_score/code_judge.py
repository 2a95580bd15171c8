"""The judge process: executes the statements of a test; names of the candidate are proxies to the candidate's process.

A proxy never lets the candidate compare: results are plain data, rebuilt here, or proxies that equal only themselves.
So a test passes for a value that the candidate has to know. Whatever breaks the protocol ends the test at once, without
an exception that the test could catch. Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from verl.utils.reward_score.code_candidate import FORWARDED, STANDARD_MODULES
from verl.utils.reward_score.code_channel import Channel, ChannelClosed, ProtocolError
from verl.utils.reward_score.code_values import Decoder, Encoder, ValueRefused

_ARRAY_METHODS = "all any item tolist equals astype mean std min max sum argmax argmin round dot flatten reshape"
# Methods of plain values. A function that must return a plain value cannot return an object that has them.
_PLAIN_METHODS = frozenset(
    name
    for kind in (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, collections.deque)
    for name in dir(kind)
    if not name.startswith("__")
) | set(_ARRAY_METHODS.split())
_VISIBLE = ("__name__", "__qualname__", "__doc__", "__module__", "__dict__", "__annotations__", "__wrapped__")
_IDENTIFIER = re.compile(r"[^\W\d]\w{0,63}")
_MISSING: Any = object()
# Modules whose functions a candidate finds by name.
_SHARED_FUNCTIONS = {"builtins": builtins, "math": math, "operator": operator}


class Judge:
    """The judge's end of the channel. `abort(reason)` ends the process with a failed test."""

    def __init__(self, descriptor: int, abort: Callable[[str], NoReturn]) -> None:
        self._channel = Channel(descriptor, self._serve)
        self._abort = abort
        self._mirrors: dict[int, Any] = {}
        self._proxies: dict[int, Any] = {}
        self._exports: list[Any] = []
        self._export_ids: dict[int, int] = {}

    def hello(self) -> bool:
        """Whether the candidate was unable to read this process before its solution ran."""
        try:
            message = self._channel.receive()
        except (ChannelClosed, ProtocolError) as error:
            self._abort(str(error))
        if len(message) != 2 or message[0] != "hello" or type(message[1]) is not bool:
            self._abort("no hello")
        return message[1]

    def load_solution(self, names: list[str], class_instances: list[str], definitions: str) -> dict[str, Any]:
        """Proxies, or values, of the names that the solution defines; it was executed when this returns."""
        values = self.request("names", names, definitions)
        if type(values) is not list or len(values) != len(names):
            self._abort("not the names")
        loaded = {name: value for name, value in zip(names, values, strict=True) if value is not _MISSING}
        for name in class_instances:
            _allow_methods(loaded.get(name))
        return loaded

    def request(self, operation: str, *parts: Any, allow_methods: bool = False) -> Any:
        """One operation in the candidate. Arguments that it changed are changed here when this returns or raises."""
        encoder = Encoder(self._export)
        try:
            encoded = [encoder.encode(part) for part in parts]
        except ValueRefused as error:
            raise TypeError(str(error)) from None
        try:
            reply = self._channel.request(operation, *encoded)
            decoder = Decoder(self._import, encoder.containers)
            outcome, node, updates, output = reply
            value = decoder.decode(node)
            for number, content in updates:
                decoder.replace(number, content)
            if outcome not in ("value", "raise") or type(output) is not str:
                raise ProtocolError("not an outcome")
        except (ChannelClosed, ProtocolError, ValueRefused, RecursionError, TypeError, ValueError) as error:
            self._abort(f"{type(error).__name__}: {error}")
        if output:
            sys.stdout.write(output)
        if outcome == "raise":
            if not isinstance(value, BaseException):
                self._abort("not an exception")
            raise value
        return _allow_methods(value) if allow_methods else value

    # -- calls of the candidate ----------------------------------------------------------------------------------

    def _serve(self, operation: str, parts: list[Any]) -> list[Any]:
        """Call a function that the test passed to the candidate; nothing else of the judge can be used."""
        if operation != "call" or len(parts) != 4 or type(parts[0]) is not int or type(parts[3]) is not str:
            raise ProtocolError("not a call")
        number, arguments, keywords, output = parts
        if not 0 <= number < len(self._exports) or not callable(self._exports[number]):
            raise ProtocolError("no such function")
        decoder = Decoder(self._import)
        args = decoder.items(arguments)
        kwargs = {name: decoder.decode(value) for name, value in keywords if type(name) is str}
        if output:
            sys.stdout.write(output)
        encoder = Encoder(self._export)
        try:
            return ["value", encoder.encode(self._exports[number](*args, **kwargs))]
        except Exception as error:  # noqa: BLE001 - raised again in the candidate
            known = getattr(builtins, type(error).__name__, None) is type(error)
            name = ["standard", "builtins", type(error).__name__ if known else "RuntimeError", ""]
            texts = [value if isinstance(value, str | int) else repr(value) for value in error.args]
            return ["raise", ["exception", name, ["tuple", *texts]]]

    # -- values --------------------------------------------------------------------------------------------------

    def _export(self, encoder: Encoder, value: Any) -> Any:
        if isinstance(value, Proxy):
            return ["object", object.__getattribute__(value, "_proxy_number")]
        if isinstance(value, Mirror):
            return ["class", type.__getattribute__(value, "_proxy_number")]
        if isinstance(value, _ClassReference):
            return ["class", value.number]
        name = getattr(value, "__name__", None)
        for module, members in _SHARED_FUNCTIONS.items():
            if isinstance(name, str) and getattr(members, name, None) is value:
                return ["standard", module, name, ""]
        if isinstance(value, BaseException) and getattr(builtins, type(value).__name__, None) is type(value):
            kind = ["standard", "builtins", type(value).__name__, ""]
            return ["exception", kind, encoder.encode(value.args)]
        if id(value) not in self._export_ids:
            self._export_ids[id(value)] = len(self._exports)
            self._exports.append(value)
        shown = str(name or type(value).__name__) if callable(value) else None
        return ["judge", self._export_ids[id(value)], shown]

    def _import(self, decoder: Decoder, node: list[Any]) -> Any:
        tag, *parts = node
        if tag == "missing" and not parts:
            return _MISSING
        if tag == "exception":
            return self._exception(decoder, *parts)
        if tag == "standard":
            return _standard_exception(*parts)
        if not all(type(number) is int and number >= 0 for number in parts):
            raise ProtocolError("not a reference")
        if tag == "class" and len(parts) == 1:
            return self._mirror(parts[0])
        if tag == "object" and len(parts) == 2:
            number, kind = parts
            if number not in self._proxies:
                mirror = self._mirror(kind)
                if not issubclass(mirror, Proxy):
                    raise ProtocolError("an exception is not an object")
                self._proxies[number] = mirror.__new__(mirror)
                object.__setattr__(self._proxies[number], "_proxy_number", number)
            return self._proxies[number]
        if tag == "judge" and len(parts) == 1 and parts[0] < len(self._exports):
            return self._exports[parts[0]]
        raise ProtocolError("not a value")

    def _mirror(self, number: int) -> Any:
        """A class of this process that stands for a class of the candidate."""
        if number not in self._mirrors:
            self._mirrors[number] = None  # a class that is its own base ends here
            name, module, bases, special = self.request("describe", _ClassReference(number))
            if type(name) is not str or not _IDENTIFIER.fullmatch(name) or type(module) is not str:
                raise ProtocolError("not a class")
            content: dict[str, Any] = {"_proxy_number": number, "_proxy_judge": self, "__module__": module}
            errors = tuple(base for base in bases if isinstance(base, type) and issubclass(base, BaseException))
            if errors:
                content["__str__"] = lambda error: getattr(error, "_proxy_text", "")
            else:
                content |= {method: _forward(method) for method in FORWARDED if method in special}
            parents: tuple[type, ...] = tuple(base for base in bases if isinstance(base, Mirror)) or (Proxy,)
            parents = errors or parents
            self._mirrors[number] = Mirror(name, parents, content)
        mirror = self._mirrors[number]
        if mirror is None:
            raise ProtocolError("a class cannot be its own base")
        return mirror

    def _exception(self, decoder: Decoder, kind: Any, args: Any, attributes: Any, text: Any) -> BaseException:
        cls = decoder.decode(kind)
        values, state = decoder.decode(args), decoder.decode(attributes)
        if not (isinstance(cls, type) and issubclass(cls, BaseException)) or type(values) is not tuple:
            raise ProtocolError("not an exception")
        error = cls.__new__(cls, *values)
        error.args = values
        if type(state) is not dict or type(text) is not str:
            raise ProtocolError("not an exception")
        for name, value in state.items():
            if type(name) is str and _IDENTIFIER.fullmatch(name):
                BaseException.__setattr__(error, name, value)
        if isinstance(cls, Mirror):
            error._proxy_text = text  # type: ignore[attr-defined]
        return error


class _ClassReference:
    def __init__(self, number: int) -> None:
        self.number = number


class Mirror(type):
    """The class of proxies to objects of one class of the candidate."""

    _proxy_number: int
    _proxy_judge: Judge

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._proxy_judge.request("call", cls, list(args), kwargs, allow_methods=True)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name not in _VISIBLE:
            raise AttributeError(name)
        return cls._proxy_judge.request("get", cls, name, allow_methods=True)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._proxy_judge.request("set", cls, name, value)

    def __iter__(cls) -> Any:
        return cls._proxy_judge.request("special", cls, "__iter__", [], allow_methods=True)

    def __len__(cls) -> int:
        return int(cls._proxy_judge.request("special", cls, "__len__", []))

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return cls._proxy_judge.request("special", cls, "__getitem__", [key], allow_methods=True)


class Proxy:
    """An object of the candidate. It equals itself only."""

    _proxy_number: int
    _proxy_judge: Judge
    _proxy_allows_methods = False
    __hash__ = object.__hash__

    def __getattribute__(self, name: str) -> Any:
        if name in ("_proxy_number", "_proxy_judge", "_proxy_allows_methods", "__class__"):
            return object.__getattribute__(self, name)
        if name.startswith("__") and name.endswith("__") and name not in _VISIBLE:
            return object.__getattribute__(self, name)
        allowed = self._proxy_allows_methods
        if not allowed and name in _PLAIN_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._proxy_judge.request("get", self, name, allow_methods=allowed)

    def __setattr__(self, name: str, value: Any) -> None:
        self._proxy_judge.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._proxy_judge.request("delete", self, name)


def _forward(method: str) -> Callable[..., Any]:
    def call(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        judge, allowed = self._proxy_judge, self._proxy_allows_methods
        if method == "__call__":
            return judge.request("call", self, list(args), kwargs, allow_methods=allowed)
        if method == "__exit__":
            args = (None, None, None)
        return judge.request("special", self, method, list(args), allow_methods=allowed)

    call.__name__ = method
    return call


def _allow_methods(value: Any) -> Any:
    """Allow the methods that plain values have as well: the test uses this object as one of a class."""
    if isinstance(value, Proxy):
        object.__setattr__(value, "_proxy_allows_methods", True)
    return value


def _standard_exception(module: Any, name: Any, fallback: Any) -> Any:
    """An exception class of a loaded module; of others its builtin base. None: not an exception."""
    if not all(type(word) is str for word in (module, name, fallback)):
        raise ProtocolError("not a class")
    standard = module.split(".")[0] in STANDARD_MODULES
    for kind in (getattr(sys.modules.get(module), name, None) if standard else None, getattr(builtins, fallback, None)):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return None


def execute_test(judge: Judge, test: Mapping[str, Any], prelude: Mapping[str, Any]) -> None:
    """Execute the statements of a test among the names of `prelude`; it has passed if this returns."""
    names: dict[str, Any] = {**prelude, "__name__": "test"}
    if test["prompt"]:
        exec(compile(test["prompt"], "prompt.py", "exec"), names)
    for name, wanted in test["modules"].items():
        module, _, member = wanted.partition(":")
        names[name] = importlib.import_module(module)
        if member:
            names[name] = getattr(names[name], member)
    names.update(judge.load_solution(test["names"], test["class_instances"], test["definitions"]))
    exec(compile(test["source"], "test.py", "exec"), names)
