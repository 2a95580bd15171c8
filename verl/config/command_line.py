"""Parsing of overrides, and conversion of the command line so that all mistakes are reported together.

Hydra stops at the first unknown key, and at `+key` for a known one. Therefore `key=value` becomes `++key=value`
(set it, known or not). Groups (`algorithm=grpo`) and `hydra.*` are passed to Hydra unchanged.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.compose import CONFIG_DIR, ROOT, groups
from verl.config.problems import ConfigError, FormattedProblem, Problem

_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)(=(?P<value>.*))?", re.DOTALL)
# Two bounds, 0.5_2: Hydra's grammar, like Python's, ignores an underscore between digits.
_BOUNDS = re.compile(r"[\d.,_]*\d_\d[\d.,_]*")
_BOUNDS_KEYS = tuple(
    f"algorithm.rollout_correction.{name}" for name in ("rollout_is_threshold", "rollout_rs_threshold")
)
# Groups that can be disabled: `critic=null`, `~critic`.
_DISABLABLE = ("critic", "reward_model")


@dataclass(frozen=True)
class Override:
    """A parsed override. A leading `+` has no effect: every key can be set."""

    key: str
    text: str
    """The value in Hydra's grammar."""
    is_option: bool = False
    """`key` is a group and the value one of its options, not a value of the key."""

    @property
    def value(self) -> Any:
        """The parsed value (number, text, list, …); a sweep (`1,2`), supported by Hydra's multirun only, as text."""
        parsed = _parse(self.text)
        return self.text if parsed.is_sweep_override() else parsed.value()


def read_override(override: str, groups: Mapping[str, Sequence[str]]) -> Override | None:
    """Parse an override; None if it is not an override of a key or group (`hydra.*`, or a mistake)."""
    match = _OVERRIDE.fullmatch(override)
    if match is None or match["key"].partition(".")[0] == "hydra":
        return None
    key, value = match["key"], match["value"] and match["value"].strip()
    if key in groups and key in _DISABLABLE and (match["sign"] == "~" or value == "null"):
        return Override(f"{key}.enable", "false")
    if match["sign"] == "~" or value is None:
        return None
    value = f"'{value}'" if key in _BOUNDS_KEYS and _BOUNDS.fullmatch(value) else value
    return Override(key, _quote_if_needed(value), key in groups and value != "null" and not value.startswith("{"))


def _quote_if_needed(value: str) -> str:
    """Quote a value that Hydra's grammar does not accept (e.g. a path that contains `=`)."""
    from hydra.errors import HydraException

    try:
        _parse(value)
    except HydraException:
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return value


@functools.lru_cache(maxsize=4096)  # 1 ms each, and each value is parsed twice: to decide on quotes, and for its value
def _parse(value: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"key={value}")


def not_an_override(word: str) -> Problem:
    """Return the problem of an argument that is not an override (e.g. without `=`): Hydra's parser would reject it."""
    fix = "Write it as key=value"
    if word.endswith((".yaml", ".yml")):
        folder, name = Path(word).parent, Path(word).stem
        fix = f"Read a YAML file with --config-path {folder} --config-name {name}"
    return FormattedProblem(word, None, f"is not an override. {fix}.", "")


# Key under which group options reach the loader when Hydra cannot select them.
GROUPS_KEY = "_groups_"
_CONFIG_OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "dir",
    "-cd": "dir",
}
# Hydra options whose value is the next argument; for --info only if it is one of _INFO_VALUES.
_OPTIONS_WITH_VALUE = (*_CONFIG_OPTIONS, "--cfg", "-c", "--package", "-p", "--experimental-rerun")
_INFO = ("--info", "-i")
_INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_QUIET_HYDRA = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
_SEARCH_PATH = "hydra.searchpath=[pkg://verl.trainer.config]"


@contextmanager
def prepared_arguments(root: str = ROOT) -> Iterator[None]:
    """Context in which `sys.argv` contains the converted arguments for Hydra."""
    original = sys.argv[1:]
    sys.argv[1:] = hydra_arguments(original, root)
    try:
        yield
    finally:
        sys.argv[1:] = original


def program_name(module: str) -> str:
    """Return the command that runs `module`, as the user typed it: `verl train`, or `python -m module`."""
    if sys.argv[0].startswith("verl "):  # set by verl.cli.main
        return sys.argv[0]
    if module == "__main__":
        module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    return f"python -m {module}"


def hydra_arguments(argv: Sequence[str], root: str = ROOT) -> list[str]:
    """Convert the user's arguments for Hydra; `root` is the YAML file with the program's defaults."""
    options, overrides = _split(argv)
    if problems := [not_an_override(word) for word in overrides if "=" not in word and not word.startswith("~")]:
        raise ConfigError(problems)
    user_config = _UserConfig.from_options(options, root)
    arguments = [_convert_override(override, user_config, groups(root)) for override in overrides]
    joined = " ".join(overrides)
    if user_config.is_used and not user_config.configures_hydra and "hydra." not in joined and "hydra/" not in joined:
        arguments += [*_QUIET_HYDRA, _SEARCH_PATH]
    # Options last: an option with an optional value (--info) would consume the first override.
    for name, value in user_config.with_absolute_path(options):
        arguments += [name, value] if value else [name]
    return arguments


@dataclass(frozen=True)
class _UserConfig:
    """Properties of the user's config file (`--config-path`, `--config-name`)."""

    path: str | None = None
    is_used: bool = False
    has_defaults: bool = False  # it has a defaults list: Hydra selects the groups
    configures_hydra: bool = False
    extends_groups: bool = False  # --config-dir: there may be further group options

    @classmethod
    def from_options(cls, options: Sequence[tuple[str, str]], root: str) -> _UserConfig:
        selected = {_CONFIG_OPTIONS[name]: value for name, value in options if name in _CONFIG_OPTIONS}
        folder, name = selected.get("path"), selected.get("name", root)
        if folder is not None and Path(folder).expanduser().is_dir():
            folder = str(Path(folder).expanduser().absolute())  # Hydra resolves it from the program's file
        used = folder is not None or name != root
        file = Path(folder or CONFIG_DIR, name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        content = OmegaConf.load(file) if used and file.is_file() else OmegaConf.create({})
        keys = set(content) if isinstance(content, DictConfig) else set()
        return cls(folder, used, "defaults" in keys, "hydra" in keys, "dir" in selected)

    def with_absolute_path(self, options: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the options with the absolute path of the config folder."""
        return [
            (name, self.path or value) if _CONFIG_OPTIONS.get(name) == "path" else (name, value)
            for name, value in options
        ]


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split arguments into options with their values, and overrides."""
    options: list[tuple[str, str]] = []
    overrides: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        name, _, value = argument.partition("=")
        if argument in _OPTIONS_WITH_VALUE or (argument in _INFO and remaining[:1] and remaining[0] in _INFO_VALUES):
            options.append((argument, remaining.pop(0) if remaining else ""))
        elif argument.startswith("-"):
            options.append((name, value) if name in _CONFIG_OPTIONS else (argument, ""))
        else:
            overrides.append(argument)
    return options, overrides


def _convert_override(override: str, user_config: _UserConfig, known: Mapping[str, Sequence[str]]) -> str:
    """Convert an override for Hydra; `known`: the options of each group."""
    parsed = read_override(override, known)
    if parsed is None:
        return override
    if not parsed.is_option:
        return f"++{parsed.key}={parsed.text}"
    hydra_selects = user_config.has_defaults or user_config.extends_groups
    if hydra_selects or (not user_config.is_used and parsed.text in known[parsed.key]):
        return override
    # The loader uses the option as the base of the user's blocks, or reports the unknown name.
    return f"++{GROUPS_KEY}.{parsed.key}={parsed.text}"
