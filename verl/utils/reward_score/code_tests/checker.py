"""The checker process: executes the statements of a test; names of the candidate are proxies to its process.

The candidate never decides a comparison: results are plain data, rebuilt here, or proxies that equal only themselves.
So a comparison succeeds only if the candidate returns the expected value. A violation of the protocol ends the test at
once, without an exception that the test could catch. Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import builtins
import importlib
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from verl.utils.reward_score.code_tests.candidate import FORWARDED, STANDARD_MODULES
from verl.utils.reward_score.code_tests.channel import Channel, ChannelClosed, ProtocolError
from verl.utils.reward_score.code_tests.proxies import Proxy, ProxyClass, forward_method
from verl.utils.reward_score.code_tests.values import Decoder, Encoded, Encoder, ValueRefused, changed

_IDENTIFIER = re.compile(r"[^\W\d]\w{0,63}")
_MISSING: Any = object()
_SINGLE_ITEMS, _MAX_BATCH = 16, 256
_MAX_ARGUMENT_ITEMS = 100_000
# Operations that load the solution's names and classes; all other operations return results.
_LOADING_OPERATIONS = ("names", "describe")
# Exceptions of these modules control a test runner; a solution must not raise them.
_RUNNERS = ("unittest", "doctest", "pytest", "_pytest", "bdb")
# Modules whose functions a candidate finds by name.
_SHARED_FUNCTIONS = {"builtins": builtins, "math": math, "operator": operator}


class CheckerSession:
    """The checker's end of the channel. `abort(reason)` ends the process with a failed test.

    `not_plain()` also ends the process. It is called if the test passes a value that cannot be sent to another process
    before the candidate has sent any value; afterwards the candidate could cause such a call.
    """

    def __init__(self, descriptor: int, abort: Callable[[str], NoReturn], not_plain: Callable[[], NoReturn]) -> None:
        self._not_plain = not_plain
        self._channel = Channel(descriptor, self._serve)
        self._abort = abort
        self._received = False  # a result, or an argument, of the candidate
        self._refuse_empty = False
        self._proxy_classes: dict[int, Any] = {}
        self._proxies: dict[int, Any] = {}
        self._generators: dict[int, tuple[Iterator[Any], int]] = {}
        self._exports: list[Any] = []
        self._export_ids: dict[int, int] = {}

    def hello(self) -> bool:
        """Whether the candidate was unable to read this process before its solution ran."""
        try:
            message = self._channel.receive()
        except (ChannelClosed, ProtocolError) as error:
            self._abort(str(error))
        if len(message) != 2 or message[0] != "hello" or type(message[1]) is not bool:
            self._abort("the first message is not a hello")
        return message[1]

    def load_solution(
        self, names: list[str], returns_instances: list[str], definitions: str, refuse_empty: bool
    ) -> dict[str, Any]:
        """Proxies, or values, of the names that the solution defines; it was executed when this returns.

        `returns_instances`: names whose results are objects with methods. No reply of the candidate decides that.
        """
        values = self.request("names", names, definitions)
        if type(values) is not list or len(values) != len(names):
            self._abort("the reply does not contain one value per name")
        loaded = {name: value for name, value in zip(names, values, strict=True) if value is not _MISSING}
        for name in returns_instances:
            value = loaded.get(name)
            if isinstance(value, ProxyClass):
                type.__setattr__(value, "_proxy_returns_instances", True)
            elif isinstance(value, Proxy):
                object.__setattr__(value, "_proxy_returns_instances", True)
                object.__setattr__(value, "_proxy_is_instance", True)
        self._refuse_empty = refuse_empty
        return loaded

    def request(self, operation: str, *parts: Any, instance: bool = False, may_stop: bool = False) -> Any:
        """One operation in the candidate. Arguments that it changed are changed here when this returns or raises.

        `instance`: the result may be an object with methods and conversions. `may_stop`: it may raise StopIteration.
        """
        encoder = Encoder(self._export)
        try:
            encoded = [encoder.encode(part) for part in parts]
        except ValueRefused as error:
            if self._received:  # the value may come from the candidate, which must not choose how it is scored
                raise TypeError(str(error)) from None
            self._not_plain()
        try:
            reply = self._channel.request(operation, *encoded)
            self._received |= operation not in _LOADING_OPERATIONS
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
            self._raise(value, may_stop)
        if self._refuse_empty and _is_empty(value):
            self._abort("an empty result in a comparison that broadcasts")
        if instance and isinstance(value, Proxy):
            object.__setattr__(value, "_proxy_is_instance", True)
        return value

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returns_instances: bool) -> Any:
        """Call a function or a class of the candidate."""
        return self.request("call", target, list(args), kwargs, returns_instances, instance=returns_instances)

    def _raise(self, error: Any, may_stop: bool) -> NoReturn:
        """Raise the exception of the candidate, unless it would end the test or one of its loops."""
        if not isinstance(error, Exception):
            self._abort(f"raised {type(error).__name__}")
        if any(kind.__module__.split(".")[0] in _RUNNERS for kind in type(error).__mro__):
            self._abort(f"raised {type(error).__name__}")
        if isinstance(error, StopIteration | StopAsyncIteration) and not may_stop:
            raise RuntimeError(f"raised {type(error).__name__}")
        raise error

    def _generator(self, number: int) -> Iterator[Any]:
        """A generator of this process for an iterator of the candidate. Its first items are requested one by one."""
        iterator = Encoded(["object", number])
        size = received = 0
        sent: Any = None
        while True:
            size = 1 if received < _SINGLE_ITEMS or sent is not None else min(2 * size, _MAX_BATCH)
            items = self.request("next", iterator, size) if sent is None else self.request("send", iterator, *sent)
            if type(items) is not list or len(items) > size:
                self._abort("the reply is not a list of at most the requested items")
            if not items:
                return
            received, sent = received + len(items), None
            for item in items:
                try:
                    value = yield item
                    sent = None if value is None else ("send", value)
                except GeneratorExit:
                    self.request("send", iterator, "close", None)
                    raise
                except Exception as error:  # noqa: BLE001 - of `throw`: raised in the candidate
                    sent = ("throw", error)
                if sent is not None:
                    break

    # -- calls of the candidate ----------------------------------------------------------------------------------

    def _serve(self, operation: str, parts: list[Any]) -> list[Any]:
        """Call a function that the test passed to the candidate; nothing else of the checker can be used."""
        if operation != "call" or len(parts) != 4 or type(parts[0]) is not int or type(parts[3]) is not str:
            raise ProtocolError("not a call")
        number, arguments, keywords, output = parts
        self._received = True
        if not 0 <= number < len(self._exports) or not callable(self._exports[number]):
            raise ProtocolError("no such function")
        decoder = Decoder(self._import)
        args = decoder.items(arguments)
        kwargs = {name: decoder.decode(value) for name, value in keywords if type(name) is str}
        before = [value.copy() for value in decoder.containers]
        if output:
            sys.stdout.write(output)
        encoder = Encoder(self._export, decoder.containers)
        try:
            reply = ["value", encoder.encode(self._exports[number](*args, **kwargs))]
        except Exception as error:  # noqa: BLE001 - raised again in the candidate
            is_builtin = getattr(builtins, type(error).__name__, None) is type(error)
            name = ["standard", "builtins", type(error).__name__ if is_builtin else "RuntimeError", ""]
            texts = [value if isinstance(value, str | int) else repr(value) for value in error.args]
            reply = ["raise", ["exception", name, ["tuple", *texts]]]
        updates = [
            [index, encoder.content(value)]
            for index, (value, old) in enumerate(zip(decoder.containers, before, strict=True))
            if changed(value, old)
        ]
        return [*reply, updates]

    # -- values --------------------------------------------------------------------------------------------------

    def _export(self, encoder: Encoder, value: Any) -> Any:
        if isinstance(value, Proxy):
            return ["object", object.__getattribute__(value, "_proxy_number")]
        if isinstance(value, ProxyClass):
            return ["class", type.__getattribute__(value, "_proxy_number")]
        if id(value) in self._generators:
            return ["object", self._generators[id(value)][1]]
        name = getattr(value, "__name__", None)
        for module, members in _SHARED_FUNCTIONS.items():
            if isinstance(name, str) and getattr(members, name, None) is value:
                return ["standard", module, name, ""]
        if isinstance(value, BaseException) and getattr(builtins, type(value).__name__, None) is type(value):
            kind = ["standard", "builtins", type(value).__name__, ""]
            return ["exception", kind, encoder.encode(value.args)]
        if hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools"):
            items = list(itertools.islice(value, _MAX_ARGUMENT_ITEMS + 1))
            if len(items) > _MAX_ARGUMENT_ITEMS:
                raise ValueRefused("an iterator of too many items")
            return ["iterator", *encoder.items(items)]
        if not callable(value) or isinstance(value, type):
            raise ValueRefused(f"an argument of type {type(value).__name__}")
        if id(value) not in self._export_ids:
            self._export_ids[id(value)] = len(self._exports)
            self._exports.append(value)
        doc = getattr(value, "__doc__", None)
        text = doc if isinstance(doc, str) else None
        return ["checker", self._export_ids[id(value)], str(name or type(value).__name__), text]

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
            return self._proxy_class(parts[0])
        if tag == "object" and len(parts) == 2:
            number, kind = parts
            if number not in self._proxies:
                proxy_class = self._proxy_class(kind)
                if not issubclass(proxy_class, Proxy):
                    raise ProtocolError("an exception is not an object")
                self._proxies[number] = proxy_class.__new__(proxy_class)
                object.__setattr__(self._proxies[number], "_proxy_number", number)
            return self._proxies[number]
        if tag == "generator" and len(parts) == 1:
            generator = self._generator(parts[0])
            self._generators[id(generator)] = generator, parts[0]
            return generator
        if tag == "checker" and len(parts) == 1 and parts[0] < len(self._exports):
            return self._exports[parts[0]]
        raise ProtocolError("not a value")

    def _proxy_class(self, number: int) -> Any:
        """A class of this process that stands for a class of the candidate."""
        if number not in self._proxy_classes:
            self._proxy_classes[number] = None  # a class that is its own base ends here
            name, module, bases, special = self.request("describe", Encoded(["class", number]))
            if type(name) is not str or not _IDENTIFIER.fullmatch(name) or type(module) is not str:
                raise ProtocolError("not a class")
            content: dict[str, Any] = {"_proxy_number": number, "_proxy_session": self, "__module__": module}
            content["_proxy_returns_instances"] = False
            errors = tuple(base for base in bases if isinstance(base, type) and issubclass(base, BaseException))
            if errors:
                content["__str__"] = lambda error: getattr(error, "_proxy_text", "")
            else:
                content |= {method: forward_method(method) for method in FORWARDED if method in special}
            parents: tuple[type, ...] = tuple(base for base in bases if isinstance(base, ProxyClass)) or (Proxy,)
            parents = errors or parents
            self._proxy_classes[number] = ProxyClass(name, parents, content)
        proxy_class = self._proxy_classes[number]
        if proxy_class is None:
            raise ProtocolError("a class cannot be its own base")
        return proxy_class

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
        if isinstance(cls, ProxyClass):
            error._proxy_text = text  # type: ignore[attr-defined]
        return error


def _is_empty(value: Any) -> bool:
    """Whether a value is an empty array or container, or contains one."""
    if isinstance(value, list | tuple) and value:
        return any(map(_is_empty, value))
    size = getattr(value, "size", None) if type(value).__module__ == "numpy" else None
    if size is not None:  # `len` of an array without dimensions raises
        return bool(size == 0)
    return hasattr(type(value), "__len__") and not isinstance(value, str | bytes | Proxy) and not len(value)


def _standard_exception(module: Any, name: Any, fallback: Any) -> Any:
    """An exception class of a loaded standard module, else the builtin class `fallback`; None: not an exception."""
    if not all(type(word) is str for word in (module, name, fallback)):
        raise ProtocolError("not a class")
    standard = module.split(".")[0] in STANDARD_MODULES
    for kind in (getattr(sys.modules.get(module), name, None) if standard else None, getattr(builtins, fallback, None)):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return None


def execute_test(session: CheckerSession, test: Mapping[str, Any], prelude: Mapping[str, Any]) -> None:
    """Execute the statements of a test among the names of `prelude`; it has passed if this returns."""
    names: dict[str, Any] = {**prelude, "__name__": "test"}
    if test["prompt"]:
        exec(compile(test["prompt"], "prompt.py", "exec"), names)
    for name, import_path in test["modules"].items():
        module, _, member = import_path.partition(":")
        names[name] = importlib.import_module(module)
        if member:
            names[name] = getattr(names[name], member)
    loaded = session.load_solution(test["names"], test["returns_instances"], test["definitions"], test["refuse_empty"])
    for name in test["names"]:
        if name not in loaded and (name in names or hasattr(builtins, name)):
            raise NameError(f"the solution does not define {name}")
    names.update(loaded)
    exec(compile(test["source"], "test.py", "exec"), names)
