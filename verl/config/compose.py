"""The YAML files in verl/trainer/config as one tree of defaults: groups, options, inheritance; without Hydra."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).parents[1] / "trainer" / "config"
ROOT = "ppo_trainer"
_HYDRAS_OWN = "override "


@functools.cache
def groups(root: str = ROOT) -> dict[str, tuple[str, ...]]:
    """Every group (`algorithm`, `critic`, …) that the file `root` selects from, with its options (`ppo`, `grpo`, …)."""
    items = _read(CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    selected = sorted(str(name) for item in items if not isinstance(item, str) for name in item)
    folders = [CONFIG_DIR / name for name in selected if not name.startswith(_HYDRAS_OWN)]
    return {path.name: tuple(sorted(file.stem for file in path.glob("*.yaml"))) for path in folders}


@functools.cache
def alternatives(group: str, root: str = ROOT) -> tuple[dict[str, Any], ...]:
    """What each option of a group that is not the usual one states by itself, as nested plain values."""
    items = _read(CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    usual = next((item[group] for item in items if not isinstance(item, str) and group in item), None)
    others = [option for option in groups(root).get(group, ()) if option != usual]
    return tuple(_plain(_read(CONFIG_DIR / group / f"{option}.yaml"), resolve=False) for option in others)


def default_tree(chosen: Mapping[str, str] | None = None, root: str = ROOT) -> dict[str, Any]:
    """The defaults with these options (`{"algorithm": "grpo"}`), `${…}` as text. Not to be changed by the caller."""
    return _tree(root, tuple(sorted((chosen or {}).items())))


def default_values(chosen: Mapping[str, str] | None = None, root: str = ROOT) -> dict[str, Any]:
    """The same with every `${…}` resolved. Not to be changed by the caller."""
    return _values(root, tuple(sorted((chosen or {}).items())))


@functools.cache
def _tree(root: str, chosen: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    tree = _load(CONFIG_DIR / f"{root}.yaml", dict(chosen))
    tree.pop("hydra", None)
    return _plain(tree, resolve=False)


@functools.cache
def _values(root: str, chosen: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return _plain(OmegaConf.create(_tree(root, chosen)), resolve=True)


def _plain(tree: DictConfig, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def _load(file: Path, chosen: Mapping[str, str]) -> DictConfig:
    """One file on top of what its `defaults` list names: an option of a group, or a neighbour it extends."""
    own = _read(file)
    tree = OmegaConf.create({})
    for item in own.pop("defaults", []):
        if isinstance(item, str):
            part = own if item == "_self_" else _load(file.parent / f"{item}.yaml", chosen)
        else:
            ((group, option),) = item.items()
            if group.startswith(_HYDRAS_OWN):
                continue
            part = OmegaConf.create({group: _load(file.parent / group / f"{chosen.get(group, option)}.yaml", chosen)})
        tree = OmegaConf.merge(tree, part)  # type: ignore[assignment]
    return OmegaConf.merge(tree, own)  # type: ignore[return-value]


def _read(file: Path) -> DictConfig:
    tree = OmegaConf.load(file)
    assert isinstance(tree, DictConfig)
    return tree
