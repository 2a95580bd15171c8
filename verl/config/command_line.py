"""The command line, prepared for Hydra, so that the strict load sees every key and reports all mistakes at once.

Hydra alone stops at the first key it does not know, and at `+key` for one it does. Here plain `key=value` becomes
`++key=value` (set it, known or not); what Hydra is good at stays: groups (`algorithm=grpo`), `hydra.*`, its grammar.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.config.compose import CONFIG_DIR, ROOT, groups
from verl.config.load import GROUPS_KEY
from verl.config.overrides import read_override

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
