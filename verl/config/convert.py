"""From plain nested values to blocks, strictly: what cannot be read is reported and replaced by its default."""

from __future__ import annotations

import difflib
import json
import os
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from verl.config.old_keys import FIXED, why_obsolete
from verl.config.problems import Report, closest, show
from verl.config.schema import Block, Entry, Key, alias_table, entries, join, walk

B = TypeVar("B", bound=Block)

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class Unreadable(Exception):
    """The value does not have the type or range of its key: why, and what to set."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why, fix)
        self.why, self.fix = why, fix


class Converter:
    """Builds blocks from plain values. `defaults` (of the whole tree) stand in for what cannot be read."""

    def __init__(self, root: type[Block], defaults: Mapping[str, Any], report: Report, extended: bool) -> None:
        self.report = report
        self.extended = extended  # users registered names of their own: extendable choices are open
        self._root = root
        self._defaults = defaults

    def convert(self, values: Any) -> Block:
        return self._block(self._root, values, self._defaults, "")

    def _block(self, cls: type[B], values: Any, defaults: Mapping[str, Any], path: str) -> B:
        if values is None:  # `critic: null`: nothing of it is wanted
            values = {**defaults, "enable": False} if "enable" in entries(cls) else defaults
        if not isinstance(values, Mapping):
            known = ", ".join(entries(cls))
            self.report.broken(path, values, "is a block of keys, not a value", f"Set keys below it ({known})")
            values = defaults
        for name in values:
            if name not in entries(cls):
                self._unknown(cls, path, str(name), values[name])
        made = {}
        for name, entry in entries(cls).items():
            where, value, default = join(path, name), values.get(name, defaults[name]), defaults[name]
            if entry.block is not None:
                made[name] = self._block(entry.block, value, default, where)
            elif entry.named_blocks is not None:
                made[name] = self._named_blocks(entry.named_blocks, value, where)
            else:
                made[name] = self._leaf(entry, value, default, where)
        return cls(**made)

    def _named_blocks(self, cls: type[B], values: Any, path: str) -> dict[str, B]:
        """Blocks under names of the user's own; what none of them sets is null."""
        if values is not None and not isinstance(values, Mapping):
            known = ", ".join(entries(cls))
            self.report.broken(path, values, "is a mapping of names to blocks", f"Set {path}.<name>.<key> ({known})")
            values = {}
        unset = dict.fromkeys(entries(cls))
        return {
            str(name): self._block(cls, value, unset, join(path, str(name))) for name, value in (values or {}).items()
        }

    def _leaf(self, entry: Entry, value: Any, default: Any, path: str) -> Any:
        try:
            return read(entry, value, self.extended)
        except Unreadable as unreadable:
            self.report.broken(path, value, unreadable.why, unreadable.fix)
            return read(entry, default, self.extended)

    def _is_settled(self, path: str, value: Any) -> bool:
        """Nothing needs the key, or only one value of it is right: another one is reported."""
        if path in FIXED:
            fixed = FIXED[path]
            if value not in (fixed.value, str(fixed.value), None):
                self.report.problem(path, value, fixed.why, fixed.fix)
            return True
        reason = why_obsolete(path)
        if reason is not None:
            self.report.notice(f"{path} is not needed and ignored: {reason}.")
        return reason is not None

    def _unknown(self, cls: type[Block], block: str, name: str, value: Any) -> None:
        """Report a name that no block has, or each key below it of which a full key is known that ends in it."""
        path = join(block, name)
        if self._is_settled(path, value):
            return
        rest: dict[str, Any] = {}
        for leaf, item in leaves(value, path):
            if leaf != path and self._is_settled(leaf, item):
                continue
            full = [] if block else keys_ending_in(self._root, leaf)
            if full:
                self.report.problem(leaf, item, "unknown key", f"Did you mean {_alternatives(full)}?")
            else:
                rest[leaf] = item
        if not rest:
            return
        if len(rest) == 1:  # name the key the user typed, not only its block
            ((path, value),) = rest.items()
        near = nearest_key(self._root, path, block, cls)
        fix = (
            f"Did you mean {near}?" if near else f"Known keys of {block or 'the top level'}: {', '.join(entries(cls))}"
        )
        self.report.problem(path, value, "unknown key", fix)


def leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Every value below `path` with its full path; an empty block is a value."""
    if isinstance(value, Mapping) and value:
        return [leaf for name, item in value.items() for leaf in leaves(item, join(path, str(name)))]
    return [(path, value)]


def keys_ending_in(root: type[Block], short: str) -> list[str]:
    """The known keys of which `short` is the end (`actor.use_dynamic_bsz`), in order of declaration.

    Below a key that holds a mapping (`engine_kwargs`) any further names may follow.
    """
    keys = {path: entry for path, entry in walk(root) if entry.block is None}
    found = [path for path in keys if path.endswith(f".{short}")]
    found += [alias for alias, path in alias_table(root).items() if alias.endswith(f".{short}") and path not in found]
    mappings = [path for path, entry in keys.items() if typing.get_origin(entry.type) is dict]
    below = ""
    while not found and "." in short:
        short, _, name = short.rpartition(".")
        below = f".{name}{below}"
        found = [f"{path}{below}" for path in mappings if path.endswith(f".{short}")]
    return found


def _alternatives(keys: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))


def nearest_key(root: type[Block], path: str, block: str, cls: type[Block]) -> str | None:
    """The known key most likely meant: a neighbour spelled alike, the same name elsewhere, or alike overall."""
    rest = path[len(block) + 1 :] if block else path
    if "." not in rest:
        spelled = {alias.rpartition(".")[2]: alias for alias in alias_table(root) if alias.rpartition(".")[0] == block}
        siblings = {name: join(block, name) for name in entries(cls)} | spelled
        near = difflib.get_close_matches(rest, siblings, n=1, cutoff=0.7)
        if near:
            return siblings[near[0]]
    known = [where for where, entry in walk(root) if entry.block is None] + list(alias_table(root))
    leaf = path.rpartition(".")[2]
    same_name = [where for where in known if where.rpartition(".")[2] == leaf]
    if same_name:
        return max(same_name, key=lambda where: _likeness(where, path))
    alike = [
        where for where in known if _likeness(where.rpartition(".")[2], leaf) > 0.6 and _likeness(where, path) > 0.6
    ]
    return max(alike, key=lambda where: _likeness(where, path), default=None)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def read(entry: Entry, value: Any, extended: bool = False) -> Any:
    """`value` as the key wants it, or Unreadable."""
    key = entry.key
    if isinstance(value, (str, bool, int)) and value in key.synonyms:
        value = _synonym(key, value)
    may_be_null = entry.optional or key.null is not None or key.required is not None
    if value is None or (value == "None" and may_be_null):  # None: as Python users write null
        if may_be_null:
            return None
        raise Unreadable("must have a value", f"Set {_wanted(entry)}")
    value = _typed(entry.type, value, entry)
    for item in value if isinstance(value, list) else [value]:
        _check_choice(key, item, extended)
        _check_range(key, item)
    if key.path:
        return [expand(item) for item in value] if isinstance(value, list) else expand(value)
    return value


def expand(path: str) -> str:
    """`~` and environment variables replaced; a URL is left alone."""
    return path if "://" in path else os.path.expanduser(os.path.expandvars(path))


def _typed(wanted: Any, value: Any, entry: Entry) -> Any:
    origin = typing.get_origin(wanted)
    if origin is list:
        return _list(typing.get_args(wanted)[0], value, entry)
    if origin is dict:
        return _dict(typing.get_args(wanted)[1], value, entry)
    if wanted is Any:
        return value
    result = _scalar(wanted, value)
    if result is None:
        raise Unreadable(f"is not {_TYPE_NAMES[wanted]}", f"Set {_wanted(entry)}")
    return result


def _scalar(wanted: type, value: Any) -> Any:
    """The value as int, float, bool or str; None when it is not one. Numbers and booleans may arrive as text."""
    if wanted is bool:
        if isinstance(value, str):
            return _WORDS.get(value.strip().lower())
        return bool(value) if isinstance(value, int) and value in (0, 1) else None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    if wanted is str:
        return str(value)
    number = _number(value)
    if number is None or wanted is float:
        return None if number is None else float(number)
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    return number


def _number(value: str | int | float) -> int | float | None:
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return None if isinstance(value, str) else value


def _list(item_type: Any, value: Any, entry: Entry) -> list[Any]:
    """A list; one value stands for a list of one, nothing for none, and a list inside a text is read."""
    if value == "":
        return []
    if isinstance(value, str) and value.strip().startswith("["):
        value = _list_in_text(value)
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        value = [value]
    return [_typed(item_type, item, entry) for item in value]


def _list_in_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    import yaml  # lists as users quote them in shells: ['a', 'b']

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Unreadable("is not a list", """Write it as '["a","b"]'""") from error


def _dict(item_type: Any, value: Any, entry: Entry) -> dict[str, Any]:
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Unreadable("is not a mapping", """Write it as '{"a": 1}'""") from error
    if not isinstance(value, Mapping):
        raise Unreadable("is a mapping of names to values, not one value", f"Set {_wanted(entry)}")
    return {str(name): _typed(item_type, item, entry) for name, item in value.items()}


def _synonym(key: Key, value: Any) -> Any:
    # True == 1 in Python: only take a synonym of the very same type.
    return next((to for name, to in key.synonyms.items() if name == value and type(name) is type(value)), value)


def _check_choice(key: Key, value: Any, extended: bool) -> None:
    if key.choices is None or value in key.choices or (key.extendable and extended):
        return
    if value in key.refused:
        raise Unreadable(*key.refused[value])
    near = closest(str(value), key.choices)
    if near is not None:
        fix = f"Did you mean {near}? Known: {', '.join(key.choices)}"
    elif key.extendable:
        fix = f"Register it in a module of external_libs, or set one of {', '.join(key.choices)}"
    else:
        fix = f"Set one of {', '.join(key.choices)}"
    raise Unreadable("is not known", fix)


def _check_range(key: Key, value: Any) -> None:
    if isinstance(value, (str, bool, Mapping)) or value is None or isinstance(value, list):
        return
    low = (key.min is None or value >= key.min) and (key.above is None or value > key.above)
    high = (key.max is None or value <= key.max) and (key.below is None or value < key.below)
    if not (low and high):
        raise Unreadable(f"must be {range_words(key)}", f"Set a value {range_words(key)}")


def range_words(key: Key) -> str:
    limits = (("at least", key.min), ("above", key.above), ("at most", key.max), ("below", key.below))
    return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def _wanted(entry: Entry) -> str:
    """What the key takes, in words for a remedy."""
    if entry.key.choices:
        return f"one of {', '.join(entry.key.choices)}"
    if entry.key.required:
        return f"e.g. {show(entry.key.required)}"
    origin = typing.get_origin(entry.type)
    if origin is list:
        return f"a list, each item {_TYPE_NAMES.get(typing.get_args(entry.type)[0], 'a value')}"
    if origin is dict:
        return "a mapping, e.g. {name: value}"
    kind = _TYPE_NAMES.get(entry.type, "a value")
    return f"{kind} {range_words(entry.key)}".rstrip()
