"""Default values: composes the YAML files in verl/trainer/config (groups, options, inheritance) without Hydra."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).parents[1] / "trainer" / "config"
ROOT = "ppo_trainer"
_HYDRA_OVERRIDE = "override "


@functools.cache
def groups(root: str = ROOT) -> dict[str, tuple[str, ...]]:
    """Return the groups (`algorithm`, `critic`, …) of the file `root` with their options (`ppo`, `grpo`, …)."""
    items = _read(CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    selected = sorted(str(name) for item in items if not isinstance(item, str) for name in item)
    folders = [CONFIG_DIR / name for name in selected if not name.startswith(_HYDRA_OVERRIDE)]
    return {path.name: tuple(sorted(file.stem for file in path.glob("*.yaml"))) for path in folders}


@functools.cache
def alternatives(group: str, root: str = ROOT) -> tuple[dict[str, Any], ...]:
    """Return the values of each non-default option of a group, as nested plain values."""
    items = _read(CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    default = next((item[group] for item in items if not isinstance(item, str) and group in item), None)
    others = [option for option in groups(root).get(group, ()) if option != default]
    return tuple(_plain(_read(CONFIG_DIR / group / f"{option}.yaml"), resolve=False) for option in others)


def default_tree(options: Mapping[str, str] | None = None, root: str = ROOT) -> dict[str, Any]:
    """Return the defaults with these options (`{"algorithm": "grpo"}`), `${…}` as text. Do not modify the result."""
    return _tree(root, tuple(sorted((options or {}).items())))


def default_values(options: Mapping[str, str] | None = None, root: str = ROOT) -> dict[str, Any]:
    """Return the defaults with every `${…}` resolved. Do not modify the result."""
    return _values(root, tuple(sorted((options or {}).items())))


@functools.cache
def _tree(root: str, options: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    tree = _load(CONFIG_DIR / f"{root}.yaml", dict(options))
    tree.pop("hydra", None)
    return _plain(tree, resolve=False)


@functools.cache
def _values(root: str, options: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return _plain(OmegaConf.create(_tree(root, options)), resolve=True)


def _plain(tree: DictConfig, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def _load(file: Path, options: Mapping[str, str]) -> DictConfig:
    """Load a file on top of the group options and files in its `defaults` list."""
    content = _read(file)
    tree = OmegaConf.create({})
    for item in content.pop("defaults", []):
        if isinstance(item, str):
            part = content if item == "_self_" else _load(file.parent / f"{item}.yaml", options)
        else:
            ((group, option),) = item.items()
            if group.startswith(_HYDRA_OVERRIDE):
                continue
            part = OmegaConf.create({group: _load(file.parent / group / f"{options.get(group, option)}.yaml", options)})
        tree = OmegaConf.merge(tree, part)  # type: ignore[assignment]
    return OmegaConf.merge(tree, content)  # type: ignore[return-value]


def _read(file: Path) -> DictConfig:
    tree = OmegaConf.load(file)
    assert isinstance(tree, DictConfig)
    return tree
