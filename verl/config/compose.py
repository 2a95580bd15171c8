"""Default values: composes the YAML files in verl/trainer/config (groups, options, inheritance) without Hydra."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CONFIG_DIR = Path(__file__).parents[1] / "trainer" / "config"
ROOT = "ppo_trainer"
_HYDRA_OVERRIDE = "override "


@functools.cache
def groups(root: str = ROOT) -> dict[str, tuple[str, ...]]:
    """Return the groups (`algorithm`, `critic`, …) of the file `root` with their options (`ppo`, `grpo`, …)."""
    items = read_yaml(CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    selected = sorted(str(name) for item in items if not isinstance(item, str) for name in item)
    folders = [CONFIG_DIR / name for name in selected if not name.startswith(_HYDRA_OVERRIDE)]
    return {path.name: tuple(sorted(file.stem for file in path.glob("*.yaml"))) for path in folders}


@functools.cache
def alternatives(group: str, root: str = ROOT) -> tuple[dict[str, Any], ...]:
    """Return the values of each non-default option of a group, as nested plain values."""
    items = read_yaml(CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    default = next((item[group] for item in items if not isinstance(item, str) and group in item), None)
    others = [option for option in groups(root).get(group, ()) if option != default]
    return tuple(read_yaml(CONFIG_DIR / group / f"{option}.yaml") for option in others)


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
    return tree


@functools.cache
def _values(root: str, options: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.create(_tree(root, options)), resolve=True)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def _load(file: Path, options: Mapping[str, str]) -> dict[str, Any]:
    """Load a file on top of the group options and files in its `defaults` list."""
    content = dict(read_yaml(file))
    tree: dict[str, Any] = {}
    for item in content.pop("defaults", []):
        if isinstance(item, str):
            part = content if item == "_self_" else _load(file.parent / f"{item}.yaml", options)
        else:
            ((group, option),) = item.items()
            if group.startswith(_HYDRA_OVERRIDE):
                continue
            part = {group: _load(file.parent / group / f"{options.get(group, option)}.yaml", options)}
        tree = merge(tree, part)
    return merge(tree, content)


def merge(base: Any, override: Any) -> Any:
    """Merge `override` into `base`, block by block; return a new dict."""
    if not isinstance(base, Mapping) or not isinstance(override, Mapping):
        return override
    return {**base, **{name: merge(base.get(name), value) for name, value in override.items()}}


@functools.cache
def read_yaml(file: Path) -> dict[str, Any]:
    values = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    assert isinstance(values, dict)
    return values


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as OmegaConf does (`1e-6` is a float); OmegaConf's own loader takes ten times as long."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
