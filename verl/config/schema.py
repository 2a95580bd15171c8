"""Declaration of configuration blocks: `key(...)` declares a key, `Block` is the base class of blocks."""

from __future__ import annotations

import copy
import difflib
import functools
import types
import typing
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, Union

_METADATA_KEY = "key"
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """The declaration of one key. The default is in the YAML files, never here."""

    doc: str
    # Null is an error unless the type includes None, or `null`, `follows` or `required` is set.
    null: str | None = None  # the meaning of null, for the docs
    follows: str | None = None  # full path of the key or block whose value replaces null
    required: str | None = None  # the default is null and users must set the key: an example value for the error
    choices: tuple[str, ...] | None = None
    extendable: bool = False  # users can register further choices through external_libs
    # Values that are not supported but that users try: value -> (cause, remedy) for the error message.
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    synonyms: Mapping[Any, Any] = field(default_factory=dict)  # accepted alternative -> value
    min: float | None = None  # inclusive, like `max`
    max: float | None = None
    above: float | None = None  # exclusive, like `below`
    below: float | None = None
    aliases: tuple[str, ...] = ()  # other names of the key, relative to its block; "../" is the parent block
    path: bool = False  # a path: expand "~" and environment variables


def key(doc: str, **rules: Any) -> Any:
    """Declare a key: `clip_ratio: float = key("Distance of the ratio from 1 …", min=0)`. Rules are fields of `Key`."""
    for name in ("choices", "aliases"):
        if name in rules:
            rules[name] = tuple(rules[name])
    return field(metadata={_METADATA_KEY: Key(doc, **rules)})


_IMMUTABLE = (str, int, float, bool, type(None))


class Block:
    """Base class of blocks, the sections of a configuration: keys are attributes; `[]`, `.get`, `in` and iteration work
    as for a dict."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        # Only called if there is no such field: the name is an alias or a mistake.
        target = _local_aliases(type(self)).get(name)
        if target is not None:
            return getattr(self, target)
        if name.startswith("__"):
            raise AttributeError(name)
        near = difflib.get_close_matches(name, entries(type(self)), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"{type(self).__name__} has no key {name!r}.{hint}")

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in entries(type(self)) or name in _local_aliases(type(self))

    def __iter__(self) -> Iterator[str]:
        return iter(entries(type(self)))

    def __len__(self) -> int:
        return len(entries(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        # Values of most keys are immutable: the general copy takes five times as long.
        copied = object.__new__(type(self))
        for name in _field_names(type(self)):
            value = getattr(self, name)
            setattr(copied, name, value if type(value) in _IMMUTABLE else copy.deepcopy(value, memo))
        return copied

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the key; `default` only if there is no such key."""
        try:
            return self[name]
        except KeyError:
            return default

    def keys(self) -> KeysView[str]:
        return entries(type(self)).keys()

    def values(self) -> ValuesView[Any]:
        return {name: getattr(self, name) for name in self}.values()

    def items(self) -> ItemsView[str, Any]:
        return {name: getattr(self, name) for name in self}.items()

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists; loading them gives an equal config."""
        return {name: _plain(value) for name, value in self.items()}


@dataclass(kw_only=True, slots=True)
class RootConfig(Block):
    """Base class of the configuration of a program (not of one block).

    `notices` are messages for the log, `changed` the keys that differ from their defaults, with their values.
    """

    notices: list[str] = field(default_factory=list, compare=False)
    changed: dict[str, Any] = field(default_factory=dict, compare=False)


def _cache_per_class(compute: Callable[[type[Block]], T]) -> Callable[[type[Block]], T]:
    """Cache per class; functools.cache would lose the types."""
    cache: dict[type[Block], T] = {}

    @functools.wraps(compute)
    def cached(cls: type[Block]) -> T:
        if cls not in cache:
            cache[cls] = compute(cls)
        return cache[cls]

    return cached


@_cache_per_class
def _field_names(cls: type[Block]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Entry:
    """A field of a block class: the declaration of its key, and its type."""

    key: Key
    type: Any  # without "| None"
    optional: bool  # whether the type includes None

    @functools.cached_property
    def block(self) -> type[Block] | None:
        """For a nested block, its class."""
        return self.type if isinstance(self.type, type) and issubclass(self.type, Block) else None

    @functools.cached_property
    def named_blocks(self) -> type[Block] | None:
        """For a mapping of names to blocks, the class of the blocks."""
        values = typing.get_args(self.type)[1:] if typing.get_origin(self.type) is dict else ()
        return values[0] if values and isinstance(values[0], type) and issubclass(values[0], Block) else None


@_cache_per_class
def entries(cls: type[Block]) -> dict[str, Entry]:
    """Return the keys of a block class in order of declaration."""
    hints = typing.get_type_hints(cls)
    declared = {}
    for item in fields(cls):  # type: ignore[arg-type]
        if _METADATA_KEY in item.metadata:
            bare, optional = _without_none(hints[item.name])
            declared[item.name] = Entry(item.metadata[_METADATA_KEY], bare, optional)
    return declared


def walk(cls: type[Block], prefix: str = "") -> Sequence[tuple[str, Entry]]:
    """Return every key and block below `cls` with its full dotted path, parents first."""
    return [(join(prefix, path), entry) for path, entry in _walk(cls)] if prefix else _walk(cls)


@_cache_per_class
def _walk(cls: type[Block]) -> tuple[tuple[str, Entry], ...]:
    found: list[tuple[str, Entry]] = []
    for name, entry in entries(cls).items():
        found.append((name, entry))
        if entry.block is not None:
            found += walk(entry.block, name)
    return tuple(found)


@_cache_per_class
def alias_table(cls: type[Block]) -> dict[str, str]:
    """Return all aliases: full path of the alias -> full path of the key."""
    table = {}
    for path, entry in walk(cls):
        for alias in entry.key.aliases:
            table[_absolute(alias, path.rpartition(".")[0])] = path
    return table


def get_path(config: Any, path: str) -> Any:
    """Return the value at a dotted path of nested blocks or mappings; `config` itself for the empty path."""
    for name in path.split(".") if path else ():
        config = config[name]
    return config


def set_path(config: Block, path: str, value: Any) -> None:
    """Set the value at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(get_path(config, parent), name, value)


def join(prefix: str, name: str) -> str:
    """Return a dotted path; `prefix` may be empty."""
    return f"{prefix}.{name}" if prefix else name


def _absolute(alias: str, block: str) -> str:
    """Return the full path of an alias that is relative to `block`, as in `Key.aliases`."""
    while alias.startswith("../"):
        alias, block = alias[3:], block.rpartition(".")[0]
    return join(block, alias)


@_cache_per_class
def _local_aliases(cls: type[Block]) -> dict[str, str]:
    """Return the aliases that are names in the same block: alias -> name of the key."""
    return {
        alias: name
        for name, entry in entries(cls).items()
        for alias in entry.key.aliases
        if "." not in alias and "/" not in alias
    }


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without `| None`, and whether it had one."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        value_types = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(value_types) != 1:
            raise TypeError(f"a key has one type, not {hint}")
        return value_types[0], True
    return hint, False


def _plain(value: Any) -> Any:
    if isinstance(value, Block):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
