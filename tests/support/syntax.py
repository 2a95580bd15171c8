"""Syntax trees of source files, parsed once per process for all tests that check them."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    gc.disable()  # the new nodes would trigger collections over all modules that other tests imported
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()
