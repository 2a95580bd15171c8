"""Text of `--help` for programs with a configuration: the most important keys, or all keys of one block.

Descriptions, types and defaults come from the declarations and the YAML files (`schema`, `compose`), as in
docs/reference/config.md. Imports neither torch nor hydra.
"""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.compose import default_tree, groups
from verl.config.convert import format_range
from verl.config.load import EVAL, GENERATION, PPO, RM, SFT, Root
from verl.config.schema import Block, Entry, alias_table, entries, get_path, join, walk

HELP_OPTIONS = ("--help", "-h")
_MIN_WIDTH, _MAX_WIDTH = 60, 120
_MAX_DEFAULT = 40  # characters
_POLICY = "actor_rollout_ref"


@dataclass(frozen=True)
class Program:
    """A program with a configuration: its purpose, its ten most important keys, the arguments of an example."""

    root: Root
    purpose: str
    keys: tuple[str, ...]
    example: str


_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_SUPERVISED_KEYS = (
    "data.train_batch_size",
    "data.max_length",
    "model.path",
    "model.lora_rank",
    "optim.lr",
    "trainer.total_epochs",
    "trainer.n_gpus_per_node",
    "trainer.default_local_dir",
)
PROGRAMS = (
    Program(
        PPO,
        "Train a model by reinforcement learning (PPO, GRPO and relatives).",
        (
            "data.train_files",
            "data.train_batch_size",
            "data.max_response_length",
            "algorithm.adv_estimator",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.actor.optim.lr",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "actor_rollout_ref.rollout.n",
            "custom_reward_function.path",
            "trainer.n_gpus_per_node",
        ),
        f"algorithm=grpo data.train_files=train.parquet actor_rollout_ref.model.path={_MODEL}",
    ),
    Program(
        SFT,
        "Fine-tune a model on given responses.",
        ("data.train_files", "data.val_files", *_SUPERVISED_KEYS),
        f"data.train_files=train.parquet model.path={_MODEL}",
    ),
    Program(
        RM,
        "Train a reward model on compared responses.",
        ("data.train_files", "data.val_files", *_SUPERVISED_KEYS),
        f"data.train_files=pairs.parquet model.path={_MODEL}",
    ),
    Program(
        GENERATION,
        "Generate responses to the prompts of a file.",
        (
            "data.path",
            "data.output_path",
            "data.prompt_key",
            "data.n_samples",
            "data.batch_size",
            "data.max_prompt_length",
            "model.path",
            "rollout.name",
            "rollout.temperature",
            "rollout.max_new_tokens",
        ),
        f"data.path=prompts.parquet data.output_path=answers.parquet model.path={_MODEL}",
    ),
    Program(
        EVAL,
        "Score the responses of a file and print metrics per data source.",
        (
            "data.path",
            "data.output_path",
            "data.response_key",
            "data.reward_fn_key",
            "data.ground_truth_key",
            "custom_reward_function.path",
            "custom_reward_function.name",
            "custom_reward_function.reward_kwargs",
            "reward_model.reward_kwargs",
            "reward_model.on_error",
        ),
        "data.path=answers.parquet",
    ),
)


def find_program(config_name: str) -> Program:
    """Return the program whose defaults are in `<config_name>.yaml`."""
    return next(program for program in PROGRAMS if program.root.yaml == config_name)


def requested_help(arguments: Sequence[str]) -> list[str] | None:
    """Return the block names after `--help` or `-h`, often none; None if help is not requested."""
    for number, argument in enumerate(arguments):
        name, _, block = argument.partition("=")
        if name in HELP_OPTIONS:
            following = [word for word in arguments[number + 1 :] if "=" not in word and not word.startswith("-")]
            return [block] if block else following
    return None


def show_help(program: Program, blocks: Sequence[str], usage: str) -> int:
    """Print the help to standard output, or the reason why there is none to standard error; return the exit code."""
    try:
        sys.stdout.write(help_text(program, blocks, usage))
    except ValueError as error:
        sys.stderr.write(f"{usage} --help {error}\n")
        return 2
    return 0


def help_text(program: Program, blocks: Sequence[str], usage: str) -> str:
    """Return the help of a program, or of these blocks and keys of it. `usage`: the command as the user typed it.

    Raises ValueError, with the closest names, for an unknown block.
    """
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size((100, 24)).columns))
    paths = [path for block in blocks for path in _resolve(program.root, block)]
    lines = [line for path in paths for line in _block_lines(program.root, path, usage, width)]
    return "\n".join(lines or _overview_lines(program, usage, width)) + "\n"


def _overview_lines(program: Program, usage: str, width: int) -> Iterator[str]:
    root = program.root
    yield f"usage: {usage} [key=value …] [--config-path DIR --config-name NAME]"
    yield f"\n{program.purpose}\n"
    yield f"example: {usage} {program.example}"
    yield "\nThe most important keys:\n"
    declared = dict(walk(root.cls))
    for path in program.keys:
        yield from _key_lines(root, path, path, declared[path], width)
    total = sum(entry.block is None for entry in declared.values())
    yield f"\nAll {total} keys: {usage} --help NAME, where NAME is a block, a key, or the end of one (actor.optim).\n"
    for name, entry in entries(root.cls).items():
        yield f"  {name:<24} {shorten(entry.key.doc, width - 27)}"
    options = [f"{group}={option}" for group, values in groups(root.yaml).items() for option in values]
    if options:
        yield from ("", *textwrap.wrap(f"Sets of defaults: {', '.join(options)}", width, subsequent_indent="  "))
    yield f"\nThe composed configuration, without a run: {usage} key=value … --cfg job"
    yield "All keys on one page: docs/reference/config.md"


def _block_lines(root: Root, path: str, usage: str, width: int) -> Iterator[str]:
    """Yield the keys of a block and the names of the blocks below it; for a key, its description."""
    entry = dict(walk(root.cls))[path]
    cls: type[Block] | None = entry.block or entry.named_blocks
    if cls is None:
        yield from _key_lines(root, path, path, entry, width)
        return
    yield f"{path}: {entry.key.doc}\n"
    prefix = path if entry.block is not None else f"{path}.<name>"
    for name, inner in entries(cls).items():
        if inner.block is None:
            yield from _key_lines(root, join(prefix, name), name, inner, width)
    below = [(name, inner) for name, inner in entries(cls).items() if inner.block is not None]
    if below:
        yield "\nBlocks below:\n"
    for name, inner in below:
        yield f"  {usage} --help {join(path, name)}  {inner.key.doc}"


def _key_lines(root: Root, path: str, name: str, entry: Entry, width: int) -> Iterator[str]:
    """Yield name and default of a key, then its indented description."""
    yield f"  {name} = {_default(root, path, entry)}"
    yield from textwrap.wrap(describe_key(root, path, entry), width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default(root: Root, path: str, entry: Entry) -> str:
    if entry.key.required:
        return "(required)"
    # Blocks with user-defined names are not in the YAML files: all of their keys are null.
    value = None if "<name>" in path else get_path(default_tree(root=root.yaml), path)
    return shorten(format_default(value), _MAX_DEFAULT)


def format_default(value: Any) -> str:
    """Format a default value as it would be written on the command line."""
    if isinstance(value, str):
        return value
    return format(value, "g") if isinstance(value, float) else json.dumps(value)


def describe_key(root: Root, path: str, entry: Entry, mark: str = "") -> str:
    """Return the meaning of a key: description, choices, range, meaning of null, aliases.

    `mark`: quotes names, for Markdown; "" for a terminal, where the default says that a key is required.
    """
    key = entry.key
    parts = [key.doc]
    if key.choices:
        more = f" or your own ({mark}external_libs{mark})" if key.extendable else ""
        parts.append(f"One of {', '.join(f'{mark}{choice}{mark}' for choice in key.choices)}{more}.")
    if format_range(key):
        parts.append(f"{format_range(key).capitalize()}.")
    if key.follows:
        parts.append(f"Null: as {mark}{key.follows}{mark}.")
    elif key.null:
        parts.append(f"Null: {key.null}.")
    if key.required and mark:
        parts.append("**Required.**")
    others = [alias for alias, canonical in alias_table(root.cls).items() if canonical == path]
    if others:
        parts.append(f"Also: {', '.join(f'{mark}{other}{mark}' for other in others)}.")
    return " ".join(parts)


def _resolve(root: Root, name: str) -> list[str]:
    """Return the full paths of a block or key given by its full path or an end of it (`actor.optim`, `lr`).

    A match directly below `actor_rollout_ref` takes precedence. Otherwise several keys may match; several matches that
    include a block raise ValueError.
    """
    declared = dict(walk(root.cls))
    name = alias_table(root.cls).get(name, name)
    if name in declared:
        return [name]
    matches = [path for path in declared if path.endswith(f".{name}")]
    if f"{_POLICY}.{name}" in matches:
        return [f"{_POLICY}.{name}"]
    if len(matches) == 1 or (matches and all(declared[path].block is None for path in matches)):
        return matches
    if matches:
        raise ValueError(f"{name}: several blocks or keys have that name: {', '.join(matches)}.")
    near = closest_paths(name, list(declared))
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{name}: no block or key has that name.{hint} Known: {', '.join(entries(root.cls))}.")


def closest_paths(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three full paths that are similar to `name`, compared with their ends of equal depth."""
    depth = name.count(".") + 1
    ends: dict[str, str] = {}
    for path in known:
        ends.setdefault(".".join(path.split(".")[-depth:]), path)
    near = difflib.get_close_matches(name, [*ends, *known], n=3)
    return list(dict.fromkeys(ends.get(match, match) for match in near))


def shorten(text: str, limit: int) -> str:
    """Return the text, cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
