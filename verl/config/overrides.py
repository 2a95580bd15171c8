"""One override, `key=value` or `group=option`, read the same wherever it comes from: by Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)(=(?P<value>.*))?", re.DOTALL)
# Two bounds, 0.5_2: Hydra's grammar, as Python's, takes an underscore between digits for nothing.
_BOUNDS = re.compile(r"[\d.,_]*\d_\d[\d.,_]*")
_OF_BOUNDS = tuple(f"algorithm.rollout_correction.{name}" for name in ("rollout_is_threshold", "rollout_rs_threshold"))
# Groups that can be turned off as a whole: `critic=null`, `~critic`.
_SWITCHABLE = ("critic", "reward_model")


@dataclass(frozen=True)
class Change:
    """What an override asks for. A `+` in front changes nothing: every key may be set."""

    key: str
    text: str
    """The value as Hydra's grammar takes it."""
    is_option: bool = False
    """`key` is a group and the value one of its options, not a value of the key."""

    @property
    def value(self) -> Any:
        """The value as a number, text, list, …; a sweep (`1,2`), which only Hydra's multirun knows, as its text."""
        parsed = _parsed(self.text)
        return self.text if parsed.is_sweep_override() else parsed.value()


def read_override(override: str, groups: Mapping[str, Sequence[str]]) -> Change | None:
    """The change that a typed override stands for; None where it is none of ours (Hydra's own, or a mistake)."""
    match = _OVERRIDE.fullmatch(override)
    if match is None or match["key"].partition(".")[0] == "hydra":
        return None
    key, value = match["key"], match["value"] and match["value"].strip()
    if key in groups and key in _SWITCHABLE and (match["sign"] == "~" or value == "null"):
        return Change(f"{key}.enable", "false")
    if match["sign"] == "~" or value is None:
        return None
    value = f"'{value}'" if key in _OF_BOUNDS and _BOUNDS.fullmatch(value) else value
    return Change(key, _quoted(value), key in groups and value != "null" and not value.startswith("{"))


def _quoted(value: str) -> str:
    """The value, quoted where Hydra's grammar would not take it (e.g. a path with `=` in it)."""
    from hydra.errors import HydraException

    try:
        _parsed(value)
    except HydraException:
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return value


def _parsed(value: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"key={value}")
