"""Every key of every configuration is read by the code that it steers."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.syntax import parsed
from verl.config import EvalConfig, GenerationConfig, PPOConfig, RMConfig, SFTConfig
from verl.config.schema import Block, Entry, key, walk

PACKAGE = Path(__file__).parents[2] / "verl"
# Under verl/config only what turns keys into others, or into a plan, uses them; rules only look at them.
WORKING = {f"config/{name}.py" for name in ("algorithm", "layout", "resolve")}
# Free-form: read by users' own code.
FOR_USERS = ("custom",)
# Read whole, whatever keys they have: where their names are looked up.
READ_WHOLE = ("actor_rollout_ref.rollout.val_kwargs",)


@functools.cache
def sources() -> dict[str, tuple[set[str], set[str]]]:
    """Of every file that may read keys: the names it looks up (attributes and texts), and all names in it."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = str(file.relative_to(PACKAGE))
        if path.startswith("config/") and path not in WORKING:
            continue
        looked_up, named = set(), set()
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                looked_up.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                looked_up.add(node.value)
            elif isinstance(node, ast.Name):
                named.add(node.id)
            elif isinstance(node, ast.arg):
                named.add(node.arg)
            elif isinstance(node, ast.alias):
                named.add(node.name)
        found[path] = (looked_up, looked_up | named)
    return found


@functools.cache
def leaves(root: type) -> dict[str, Entry]:
    return {path: entry for path, entry in walk(root) if entry.block is None}


@functools.cache
def owners(root: type) -> dict[str, set[str]]:
    """Names of the blocks in which a key of this name is declared."""
    found: dict[str, set[str]] = {}
    for path in leaves(root):
        block, _, name = path.rpartition(".")
        found.setdefault(name, set()).add(block.rpartition(".")[2])
    return found


@functools.cache
def blocks(root: type) -> dict[str, Entry]:
    return {path: entry for path, entry in walk(root) if entry.block is not None}


def is_read(path: str, entry: Entry, root: type) -> bool:
    """Looked up in a file that also names its block or the block's class.

    A name of several words that only one kind of block has needs no more than itself; a common word (`path`, `enable`)
    is never proof alone. What another key follows is read through that key.
    """
    if path in FOR_USERS:
        return True
    block, _, name = path.rpartition(".")
    if block in READ_WHOLE:
        return any(block.rpartition(".")[2] in looked_up for looked_up, _ in sources().values())
    cls = blocks(root)[block].block if block else root
    owner = {block.rpartition(".")[2], *(base.__name__ for base in cls.__mro__ if base not in Block.__mro__)}
    sure = not block or ("_" in name and len(owners(root)[name]) == 1)
    if any(name in looked_up and (sure or owner & named) for looked_up, named in sources().values()):
        return True
    return any(other.key.follows == path for other in leaves(root).values())


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, RMConfig, GenerationConfig, EvalConfig])
def test_every_key_is_read(root):
    assert [path for path, entry in leaves(root).items() if not is_read(path, entry, root)] == []


@dataclass(kw_only=True, slots=True)
class NoSuchBlock(Block):
    read_by_nobody: int = key("A name of its own.")
    path: str = key("A name that other blocks have too.")


@dataclass(kw_only=True, slots=True)
class Root(Block):
    no_such_block: NoSuchBlock = key("A block that no code names.")


@pytest.mark.parametrize("path", ["no_such_block.read_by_nobody", "no_such_block.path"])
def test_a_key_that_nothing_reads_is_found(path: str):
    assert not is_read(path, leaves(Root)[path], Root)
