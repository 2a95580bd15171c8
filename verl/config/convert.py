"""Strict conversion of plain nested values to blocks; invalid values are reported and replaced by their defaults."""

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

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


class InvalidValue(Exception):
    """A value does not have the type or range of its key. `why` is the cause, `fix` the remedy."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why, fix)
        self.why, self.fix = why, fix


class Converter:
    """Builds blocks from plain values; `defaults` (of the whole tree) replace invalid values."""

    def __init__(self, root: type[Block], defaults: Mapping[str, Any], report: Report, extended: bool) -> None:
        self.report = report
        self.extended = extended  # external_libs is set: accept any value of extendable choices
        self._root = root
        self._defaults = defaults

    def convert(self, values: Any) -> Block:
        """Return the root block; problems are added to `report`."""
        return self._block(self._root, values, self._defaults, "")

    def _block(self, cls: type[B], values: Any, defaults: Mapping[str, Any], path: str) -> B:
        if values is None:  # `critic: null` disables the block
            values = {**defaults, "enable": False} if "enable" in entries(cls) else defaults
        if not isinstance(values, Mapping):
            known = ", ".join(entries(cls))
            self.report.invalid(path, values, "is a block of keys, not a value", f"Set keys below it ({known})")
            values = defaults
        for name in values:
            if name not in entries(cls):
                self._unknown(cls, path, str(name), values[name])
        converted = {}
        for name, entry in entries(cls).items():
            key_path, value, default = join(path, name), values.get(name, defaults[name]), defaults[name]
            if entry.block is not None:
                converted[name] = self._block(entry.block, value, default, key_path)
            elif entry.named_blocks is not None:
                converted[name] = self._named_blocks(entry.named_blocks, value, key_path)
            else:
                converted[name] = self._leaf(entry, value, default, key_path)
        return cls(**converted)

    def _named_blocks(self, cls: type[B], values: Any, path: str) -> dict[str, B]:
        """Convert a mapping of user-defined names to blocks; keys that are not set are null."""
        if values is not None and not isinstance(values, Mapping):
            known = ", ".join(entries(cls))
            self.report.invalid(
                path, values, "must be a mapping of names to blocks", f"Set {path}.<name>.<key> ({known})"
            )
            values = {}
        unset = dict.fromkeys(entries(cls))
        return {
            str(name): self._block(cls, value, unset, join(path, str(name))) for name, value in (values or {}).items()
        }

    def _leaf(self, entry: Entry, value: Any, default: Any, path: str) -> Any:
        try:
            return parse_value(entry, value, self.extended)
        except InvalidValue as error:
            self.report.invalid(path, value, error.why, error.fix)
            return parse_value(entry, default, self.extended)

    def _handle_old_key(self, path: str, value: Any) -> bool:
        """Return whether the key is one of an earlier version. If its value is now fixed, report other values; if it is
        obsolete, add a notice."""
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
        """Report an unknown key; for an abbreviated block (`actor.lr=…`), each key below it with the full key."""
        path = join(block, name)
        if self._handle_old_key(path, value):
            return
        unknown: dict[str, Any] = {}
        for leaf, item in leaves(value, path):
            if leaf != path and self._handle_old_key(leaf, item):
                continue
            full_keys = [] if block else keys_ending_in(self._root, leaf)
            if full_keys:
                self.report.problem(leaf, item, "unknown key", f"Did you mean {_alternatives(full_keys)}?")
            else:
                unknown[leaf] = item
        if not unknown:
            return
        if len(unknown) == 1:  # report the key that the user typed, not its block
            ((path, value),) = unknown.items()
        near = nearest_key(self._root, path, block, cls)
        fix = (
            f"Did you mean {near}?" if near else f"Known keys of {block or 'the top level'}: {', '.join(entries(cls))}"
        )
        self.report.problem(path, value, "unknown key", fix)


def leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return every value below `path` with its full path; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        return [leaf for name, item in value.items() for leaf in leaves(item, join(path, str(name)))]
    return [(path, value)]


def keys_ending_in(root: type[Block], short: str) -> list[str]:
    """Return the known keys that end in `short` (`actor.use_dynamic_bsz`), in order of declaration.

    Keys that are mappings (`engine_kwargs`) may be followed by any names.
    """
    keys = {path: entry for path, entry in walk(root) if entry.block is None}
    matches = [path for path in keys if path.endswith(f".{short}")]
    aliases = alias_table(root).items()
    matches += [alias for alias, path in aliases if alias.endswith(f".{short}") and path not in matches]
    mappings = [path for path, entry in keys.items() if typing.get_origin(entry.type) is dict]
    below = ""
    while not matches and "." in short:
        short, _, name = short.rpartition(".")
        below = f".{name}{below}"
        matches = [f"{path}{below}" for path in mappings if path.endswith(f".{short}")]
    return matches


def _alternatives(keys: list[str]) -> str:
    """Format keys as `a`, `a or b` or `a, b or c`."""
    return " or ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))


def nearest_key(root: type[Block], path: str, block: str, cls: type[Block]) -> str | None:
    """Return the most similar known key: in the same block, of the same name elsewhere, or by overall similarity."""
    relative = path[len(block) + 1 :] if block else path
    if "." not in relative:
        aliases = {alias.rpartition(".")[2]: alias for alias in alias_table(root) if alias.rpartition(".")[0] == block}
        siblings = {name: join(block, name) for name in entries(cls)} | aliases
        near = difflib.get_close_matches(relative, siblings, n=1, cutoff=0.7)
        if near:
            return siblings[near[0]]
    known = [other for other, entry in walk(root) if entry.block is None] + list(alias_table(root))
    leaf = path.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == leaf]
    if same_name:
        return max(same_name, key=lambda other: _similarity(other, path))
    similar = [
        other for other in known if _similarity(other.rpartition(".")[2], leaf) > 0.6 and _similarity(other, path) > 0.6
    ]
    return max(similar, key=lambda other: _similarity(other, path), default=None)


def _similarity(first: str, second: str) -> float:
    """Return a number from 0 (nothing in common) to 1 (equal)."""
    return difflib.SequenceMatcher(None, first, second).ratio()


def parse_value(entry: Entry, value: Any, extended: bool = False) -> Any:
    """Convert `value` to the type of the key and check it; raise InvalidValue."""
    key = entry.key
    if isinstance(value, (str, bool, int)) and value in key.synonyms:
        value = _resolve_synonym(key, value)
    may_be_null = entry.optional or any(rule is not None for rule in (key.null, key.follows, key.required))
    if value is None or (value == "None" and may_be_null):  # Python's spelling of null
        if may_be_null:
            return None
        raise InvalidValue("must have a value", f"Set {_describe_expected(entry)}")
    value = _to_type(entry.type, value, entry)
    for item in value if isinstance(value, list) else [value]:
        _check_choice(key, item, extended)
        _check_range(key, item)
    if key.path:
        return [expand(item) for item in value] if isinstance(value, list) else expand(value)
    return value


def expand(path: str) -> str:
    """Expand `~` and environment variables; URLs stay unchanged."""
    return path if "://" in path else os.path.expanduser(os.path.expandvars(path))


def _to_type(target: Any, value: Any, entry: Entry) -> Any:
    """Convert `value` to `target`, the type of the key or of its items; raise InvalidValue."""
    origin = typing.get_origin(target)
    if origin is list:
        return _list(typing.get_args(target)[0], value, entry)
    if origin is dict:
        return _dict(typing.get_args(target)[1], value, entry)
    if target is Any:
        return value
    result = _scalar(target, value)
    if result is None:
        raise InvalidValue(f"is not {_TYPE_NAMES[target]}", f"Set {_describe_expected(entry)}")
    return result


def _scalar(target: type, value: Any) -> Any:
    """Convert to int, float, bool or str; None if impossible. Numbers and booleans may be strings."""
    if target is bool:
        if isinstance(value, str):
            return _BOOLEANS.get(value.strip().lower())
        return bool(value) if isinstance(value, int) and value in (0, 1) else None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    if target is str:
        return str(value)
    number = _number(value)
    if number is None or target is float:
        return None if number is None else float(number)
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    return number


def _number(value: str | int | float) -> int | float | None:
    """Parse a string as int or else as float, None if it is neither; numbers stay unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return None if isinstance(value, str) else value


def _list(item_type: Any, value: Any, entry: Entry) -> list[Any]:
    """Convert to a list. A single value becomes a list of one item, "" an empty list; a string may contain a list."""
    if value == "":
        return []
    if isinstance(value, str) and value.strip().startswith("["):
        value = _parse_list(value)
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        value = [value]
    return [_to_type(item_type, item, entry) for item in value]


def _parse_list(text: str) -> Any:
    """Parse a string that contains a list in JSON or YAML."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    import yaml  # also reads lists in shell quotes: ['a', 'b']

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidValue("is not a list", """Write it as '["a","b"]'""") from error


def _dict(item_type: Any, value: Any, entry: Entry) -> dict[str, Any]:
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidValue("is not a mapping", """Write it as '{"a": 1}'""") from error
    if not isinstance(value, Mapping):
        raise InvalidValue("must be a mapping of names to values", f"Set {_describe_expected(entry)}")
    return {str(name): _to_type(item_type, item, entry) for name, item in value.items()}


def _resolve_synonym(key: Key, value: Any) -> Any:
    """Return the value that `value` is a synonym of, or `value` itself."""
    # True == 1 in Python: the type must match as well.
    synonyms = key.synonyms.items()
    return next((target for name, target in synonyms if name == value and type(name) is type(value)), value)


def _check_choice(key: Key, value: Any, extended: bool) -> None:
    if key.choices is None or value in key.choices or (key.extendable and extended):
        return
    if value in key.refused:
        raise InvalidValue(*key.refused[value])
    near = closest(str(value), key.choices)
    if near is not None:
        fix = f"Did you mean {near}? Known: {', '.join(key.choices)}"
    elif key.extendable:
        fix = f"Register it in a module of external_libs, or set one of {', '.join(key.choices)}"
    else:
        fix = f"Set one of {', '.join(key.choices)}"
    raise InvalidValue("is not known", fix)


def _check_range(key: Key, value: Any) -> None:
    if value is None or isinstance(value, (str, bool, Mapping, list)):
        return
    high_enough = (key.min is None or value >= key.min) and (key.above is None or value > key.above)
    low_enough = (key.max is None or value <= key.max) and (key.below is None or value < key.below)
    if not (high_enough and low_enough):
        raise InvalidValue(f"must be {format_range(key)}", f"Set a value {format_range(key)}")


def format_range(key: Key) -> str:
    """Format the bounds of a key: `at least 0 and below 1`; "" without bounds."""
    limits = (("at least", key.min), ("above", key.above), ("at most", key.max), ("below", key.below))
    return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def _describe_expected(entry: Entry) -> str:
    """Describe the values of the key, for a remedy."""
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
    return f"{kind} {format_range(entry.key)}".rstrip()
