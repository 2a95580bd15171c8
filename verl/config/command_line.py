"""The command line, prepared for Hydra, so that the strict load sees every key and reports all mistakes at once.

Hydra alone stops at the first key it does not know, and at `+key` for one it does. Here plain `key=value` becomes
`++key=value` (set it, known or not); what Hydra is good at stays: groups (`algorithm=grpo`), `hydra.*`, its grammar.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.compose import CONFIG_DIR, ROOT, groups

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


# Key under which group options reach the loader when Hydra cannot select them.
GROUPS_KEY = "_groups_"
_OWN_CONFIG = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "dir",
    "-cd": "dir",
}
# Options of Hydra's whose value is the next word; of --info only if it is one of these.
_TAKE_A_WORD = (*_OWN_CONFIG, "--cfg", "-c", "--package", "-p", "--experimental-rerun")
_INFO = ("--info", "-i")
_INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_QUIET_HYDRA = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
_SEARCH_OURS = "hydra.searchpath=[pkg://verl.trainer.config]"


@contextmanager
def prepared_arguments(root: str = ROOT) -> Iterator[None]:
    """While inside, `sys.argv` is what Hydra should read for what the user typed."""
    typed = sys.argv[1:]
    sys.argv[1:] = hydra_arguments(typed, root)
    try:
        yield
    finally:
        sys.argv[1:] = typed


def hydra_arguments(argv: Sequence[str], root: str = ROOT) -> list[str]:
    """The arguments to give Hydra for what the user typed to the program whose defaults are in the file `root`."""
    options, overrides = _split(argv)
    own = _OwnConfig.of(options, root)
    arguments = [_rewritten(override, own, groups(root)) for override in overrides]
    typed = " ".join(overrides)
    if own.is_used and not own.configures_hydra and "hydra." not in typed and "hydra/" not in typed:
        arguments += [*_QUIET_HYDRA, _SEARCH_OURS]
    # Options last: one whose value may be left out (--info) would take the first override for it.
    return arguments + [word for name, value in own.options(options) for word in ((name, value) if value else (name,))]


@dataclass(frozen=True)
class _OwnConfig:
    """What a user's `--config-path/--config-name` says about itself."""

    path: str | None = None
    is_used: bool = False
    has_defaults: bool = False  # a Hydra defaults list: Hydra selects the groups, ours or theirs
    configures_hydra: bool = False
    extends_groups: bool = False  # --config-dir: there may be options that are not ours

    @classmethod
    def of(cls, options: Sequence[tuple[str, str]], root: str) -> _OwnConfig:
        given = {_OWN_CONFIG[name]: value for name, value in options if name in _OWN_CONFIG}
        folder, name = given.get("path"), given.get("name", root)
        if folder is not None and Path(folder).expanduser().is_dir():
            folder = str(Path(folder).expanduser().absolute())  # Hydra would look beside the program
        used = folder is not None or name != root
        file = Path(folder or CONFIG_DIR, name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        content = OmegaConf.load(file) if used and file.is_file() else OmegaConf.create({})
        keys = set(content) if isinstance(content, DictConfig) else set()
        return cls(folder, used, "defaults" in keys, "hydra" in keys, "dir" in given)

    def options(self, typed: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        return [
            (name, self.path or value) if _OWN_CONFIG.get(name) == "path" else (name, value) for name, value in typed
        ]


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Options with their values, and overrides."""
    options: list[tuple[str, str]] = []
    overrides: list[str] = []
    waiting = list(argv)
    while waiting:
        argument = waiting.pop(0)
        name, _, value = argument.partition("=")
        if argument in _TAKE_A_WORD or (argument in _INFO and waiting[:1] and waiting[0] in _INFORMATION):
            options.append((argument, waiting.pop(0) if waiting else ""))
        elif argument.startswith("-"):
            options.append((name, value) if name in _OWN_CONFIG else (argument, ""))
        else:
            overrides.append(argument)
    return options, overrides


def _rewritten(override: str, own: _OwnConfig, known: Mapping[str, Sequence[str]]) -> str:
    change = read_override(override, known)
    if change is None:
        return override
    if not change.is_option:
        return f"++{change.key}={change.text}"
    native = own.has_defaults or own.extends_groups or (not own.is_used and change.text in known[change.key])
    # Not Hydra's to select: our loader takes it as the base under the user's blocks, or reports the wrong name.
    return override if native else f"++{GROUPS_KEY}.{change.key}={change.text}"
