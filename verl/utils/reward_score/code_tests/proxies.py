"""Proxies in the checker process, which runs a test, for classes and objects of the candidate process, which runs the
solution.

The candidate's code never decides a comparison: a proxy equals only itself. Unless the test uses it as an object, it
has none of the attributes of plain values. Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from verl.utils.reward_score.code_tests.values import Encoded

# Methods of numpy arrays and pandas objects that tests call on results.
ARRAY_METHODS = [
    "all",
    "any",
    "item",
    "tolist",
    "equals",
    "astype",
    "mean",
    "std",
    "min",
    "max",
    "sum",
    "argmax",
    "argmin",
    "round",
    "dot",
    "flatten",
    "reshape",
]
# Methods of plain values. A function that must return a plain value cannot return an object that has them.
_PLAIN_METHODS = frozenset(
    name
    for kind in (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, collections.deque)
    for name in dir(kind)
    if not name.startswith("__")
) | set(ARRAY_METHODS)
# Dunder attributes that are requested from the candidate.
_VISIBLE = ("__name__", "__qualname__", "__doc__", "__module__", "__dict__", "__annotations__", "__wrapped__")


class ProxyClass(type):
    """Metaclass: each instance is the class of the proxies for one class of the candidate.

    `_proxy_returns_instances`: the test uses it as a class, so that a call returns an object with methods.
    """

    _proxy_number: int
    _proxy_session: Any  # a CheckerSession
    _proxy_returns_instances: bool

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        returns_instances = cls.__dict__["_proxy_returns_instances"]
        return cls._proxy_session.call(cls, args, kwargs, returns_instances)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name not in _VISIBLE:
            raise AttributeError(name)
        if name in _PLAIN_METHODS and not cls.__dict__["_proxy_returns_instances"]:
            raise AttributeError(name)
        return cls._proxy_session.request("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._proxy_session.request("set", cls, name, value)

    def __iter__(cls) -> Any:
        return cls._call_special("__iter__")

    def __len__(cls) -> int:
        return int(cls._call_special("__len__"))

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return cls._call_special("__getitem__", key)

    def _call_special(cls, method: str, *args: Any) -> Any:
        if not cls.__dict__["_proxy_returns_instances"]:
            raise TypeError(f"{cls.__name__} has no {method}")
        return cls._proxy_session.request("special", cls, method, list(args))


class Proxy:
    """An object of the candidate. It equals only itself.

    `_proxy_is_instance`: the test uses it as an object of a class, so it has methods and conversions. Other
    proxies have no attribute that a plain value has: they can be called, iterated over and passed back, and have other
    attributes.
    """

    _proxy_number: int
    _proxy_session: Any  # a CheckerSession
    _proxy_returns_instances = False
    _proxy_is_instance = False
    _proxy_items: Any = None
    _proxy_truth: Any = None
    __hash__ = object.__hash__

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_proxy_") or name == "__class__":
            return object.__getattribute__(self, name)
        if name.startswith("__") and name.endswith("__") and name not in _VISIBLE:
            return object.__getattribute__(self, name)
        if not self._proxy_is_instance and name in _PLAIN_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._proxy_session.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._proxy_session.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._proxy_session.request("delete", self, name)

    def __bool__(self) -> bool:
        # An object that the test does not use as an instance must not change its truth value between two uses.
        if self._proxy_truth is None or self._proxy_is_instance:
            object.__setattr__(self, "_proxy_truth", self._proxy_session.request("truth", self) is True)
        return bool(self._proxy_truth)


def forward_method(method: str) -> Callable[..., Any]:
    """Return a special method for proxies that calls the method of this name of the candidate's object."""

    def call(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        if method == "__call__":
            fields = object.__getattribute__(self, "__dict__")
            target = Encoded(["object", fields["_proxy_number"]])
            return type(self)._proxy_session.call(target, args, kwargs, fields.get("_proxy_returns_instances", False))
        session, is_instance = self._proxy_session, self._proxy_is_instance
        if method == "__next__":
            return session.request("special", self, method, [], may_stop=True)
        if not is_instance:
            if method == "__iter__":
                return _repeatable_items(self)
            if method in ("__str__", "__repr__"):
                return object.__repr__(self)
            raise TypeError(f"{type(self).__name__!r} object has no {method}")
        return session.request("special", self, method, list(args))

    call.__name__ = method
    return call


def _repeatable_items(proxy: Proxy) -> Iterator[Any]:
    """Return an iterator over the items of an object. They are requested once, so that every iteration is equal."""
    items = proxy._proxy_items
    if items is None:
        items = proxy._proxy_session.request("special", proxy, "__iter__", [])
        if items is proxy:
            return proxy  # the object is its own iterator
    iterator, unconsumed = itertools.tee(items)
    object.__setattr__(proxy, "_proxy_items", unconsumed)
    return iterator
