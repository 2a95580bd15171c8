"""Modules of docs/scripts, which is not a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "docs/scripts"


def load_script(name: str) -> ModuleType:
    """Return the module of the file `name` in docs/scripts."""
    path = FOLDER / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
