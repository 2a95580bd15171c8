"""The YAML files in verl/trainer/config as one tree of defaults: groups, options, inheritance; without Hydra."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).parents[1] / "trainer" / "config"
ROOT = "ppo_trainer"


@functools.cache
def groups() -> dict[str, tuple[str, ...]]:
    """Every group (`algorithm`, `critic`, …) with its options (`ppo`, `grpo`, …)."""
    folders = sorted(path for path in CONFIG_DIR.iterdir() if any(path.glob("*.yaml")))
    return {path.name: tuple(sorted(file.stem for file in path.glob("*.yaml"))) for path in folders}


def default_tree(chosen: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The defaults with these options (`{"algorithm": "grpo"}`), `${…}` as text. Not to be changed by the caller."""
    return _tree(tuple(sorted((chosen or {}).items())))


def default_values(chosen: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The same with every `${…}` resolved. Not to be changed by the caller."""
    return _values(tuple(sorted((chosen or {}).items())))


@functools.cache
def _tree(chosen: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    tree = _load(CONFIG_DIR / f"{ROOT}.yaml", dict(chosen))
    tree.pop("hydra", None)
    return _plain(tree, resolve=False)


@functools.cache
def _values(chosen: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return _plain(OmegaConf.create(_tree(chosen)), resolve=True)


def _plain(tree: DictConfig, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def _load(file: Path, chosen: Mapping[str, str]) -> DictConfig:
    """One file on top of what its `defaults` list names: an option of a group, or a neighbour it extends."""
    own = OmegaConf.load(file)
    assert isinstance(own, DictConfig)
    tree = OmegaConf.create({})
    for item in own.pop("defaults", []):
        if isinstance(item, str):
            part = own if item == "_self_" else _load(file.parent / f"{item}.yaml", chosen)
        else:
            ((group, option),) = item.items()
            if group.startswith("override "):
                continue  # Hydra's own settings
            part = OmegaConf.create({group: _load(file.parent / group / f"{chosen.get(group, option)}.yaml", chosen)})
        tree = OmegaConf.merge(tree, part)  # type: ignore[assignment]
    return OmegaConf.merge(tree, own)  # type: ignore[return-value]
