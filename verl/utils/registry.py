"""Registry: functions and classes by name. Built-in ones are imported on first use; users add theirs by decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from verl.config.problems import closest

T = TypeVar("T", bound=Callable[..., Any])


class BuiltInEntry(Protocol):
    """A built-in entry by import path; it may have traits, which configuration and docs read."""

    @property
    def import_path(self) -> str:
        """`module:attribute`."""


class Registry(MutableMapping[str, T]):
    """Functions or classes by name. `key` is the configuration key that selects one, for error messages.

    Behaves like a dict, with one difference: assigning another function to a name that is in use raises ValueError;
    delete the name first. `clear()` and `del` remove built-in entries too, until they are assigned again.
    """

    def __init__(self, key: str, built_in: Mapping[str, BuiltInEntry] = MappingProxyType({})) -> None:
        self.key = key
        self._built_in = dict(built_in)
        self._loaded: dict[str, T] = {}

    def register(self, name: str | Enum, **traits: Any) -> Callable[[T], T]:
        """`@register("mine")` adds a function or class. `verl.config.names` reads the traits from the source."""
        name = _to_text(name)

        def add(entry: T) -> T:
            origin = f"{entry.__module__}:{entry.__qualname__}"
            # The same file imported twice (external_libs, a notebook cell) defines its functions again.
            if name in self and self._origin(name) != origin:
                owner = self._origin(name).replace(":", ".")
                raise ValueError(f"{self.key}: {name!r} is taken by {owner}. Choose another name.")
            self._loaded[name] = entry
            return entry

        return add

    def lookup(self, name: str | Enum) -> T:
        """Return the entry of that name. ValueError, with all names, if it is unknown."""
        name = _to_text(name)
        if name not in self:
            near = closest(name, self)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ValueError(
                f"{self.key}: {name!r} is not known.{hint} Register your own names in a module listed in "
                f"external_libs. Known: {', '.join(self)}."
            )
        return self[name]

    def __getitem__(self, name: str | Enum) -> T:
        name = _to_text(name)
        if name not in self._loaded:
            self._loaded[name] = resolve_name(self._built_in[name].import_path)
        return self._loaded[name]

    def __setitem__(self, name: str | Enum, entry: T) -> None:
        self.register(name)(entry)

    def __delitem__(self, name: str | Enum) -> None:
        name = _to_text(name)
        if name not in self:
            raise KeyError(name)
        self._loaded.pop(name, None)
        self._built_in.pop(name, None)

    def clear(self) -> None:
        """Remove all entries, without importing the built-in ones."""
        self._loaded.clear()
        self._built_in.clear()

    def copy(self) -> dict[str, T]:
        """Return all entries, imported, in a plain dict: `registry.update(saved)` restores them after `clear()`."""
        return dict(self)

    def __contains__(self, name: object) -> bool:
        return _to_text(name) in self._loaded or _to_text(name) in self._built_in

    def __iter__(self) -> Iterator[str]:
        return iter({**self._built_in, **self._loaded})

    def __len__(self) -> int:
        return len(self._built_in.keys() | self._loaded.keys())

    def _origin(self, name: str) -> str:
        entry = self._loaded.get(name)
        return self._built_in[name].import_path if entry is None else f"{entry.__module__}:{entry.__qualname__}"


def _to_text(name: object) -> str:
    return str(name.value if isinstance(name, Enum) else name)
