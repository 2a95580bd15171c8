"""`docs/config.md`, made from the declarations and the YAML defaults: `python -m verl.config.docs > docs/config.md`."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

from verl.config.compose import CONFIG_DIR, default_tree, groups
from verl.config.convert import range_words
from verl.config.load import EVAL, GENERATION, PPO, RM, SFT, Root
from verl.config.old_keys import FIXED, OBSOLETE
from verl.config.schema import Block, Entry, alias_table, entries, join, pick

_INTRO = """# Configuration

<!-- made by `python -m verl.config.docs > docs/config.md`; edit the declarations in verl/config instead -->

Every key of `python -m verl.trainer.main_ppo key=value …`, its default, and what it means. Declarations are in
`verl/config/`, defaults in `verl/trainer/config/`.

- `key=value` sets a key, `group=option` selects a file of defaults. A `+` in front is never needed and never hurts.
- A YAML of your own with only some blocks: `--config-path DIR --config-name NAME`; the rest are the defaults.
- Null defaults are resolved before anything starts: the table says to what. `critic=null` turns the critic off.
- Where a list is expected, one value or a list inside a string will do: `trainer.logger='["console","wandb"]'`.
- `~` and environment variables in paths are expanded. `${…}` refers to other keys, `${oc.env:NAME}` to the environment.
- Every mistake is reported before Ray starts, all at once, with what to set instead; exit code 2.
- From Python: `from verl.config import load_config, batch_plan`; `load_config({...}, ["trainer.nnodes=2"])`.
"""

_SFT_INTRO = """# Supervised fine-tuning

Every key of `python -m verl.trainer.main_sft key=value …`; all that is said above holds for them too. There are no
groups. Several ranks (`trainer.n_gpus_per_node=2`) run on Ray, one runs in the calling process.
"""

_RM_INTRO = """# Reward models

Every key of `python -m verl.trainer.main_rm key=value …` ([reward_models.md](reward_models.md)), likewise.
"""

_GENERATION_INTRO = """# Generation

Every key of `python -m verl.trainer.main_generation key=value …` ([inference.md](inference.md)); all that is said above
holds for them too. There are no groups.
"""

_EVAL_INTRO = """# Evaluation

Every key of `python -m verl.trainer.main_eval key=value …` ([inference.md](inference.md)), likewise.
"""

_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}


def render() -> str:
    """The whole page."""
    ppo = [_INTRO, *_groups(), *_blocks(PPO, PPO.cls, ""), *_aliases(PPO), *_obsolete()]
    sft = [_SFT_INTRO, *_program(SFT, "SFT: ")]
    rm = [_RM_INTRO, *_program(RM, "Reward model: ")]
    generation = [_GENERATION_INTRO, *_program(GENERATION, "Generation: ")]
    evaluation = [_EVAL_INTRO, *_program(EVAL, "Evaluation: ")]
    return "\n".join([*ppo, *sft, *rm, *generation, *evaluation])


def _program(root: Root, heading: str) -> Iterator[str]:
    """All of a program's keys, and their other spellings if they have any."""
    yield from _blocks(root, root.cls, "", heading=heading)
    if alias_table(root.cls):
        yield from _aliases(root, heading)


def _groups() -> Iterator[str]:
    yield "## Groups\n"
    yield "| group | options | selected by default |"
    yield "|---|---|---|"
    for group, options in groups().items():
        chosen = next(option for option in options if _is_default(group, option))
        yield f"| `{group}` | {', '.join(f'`{group}={option}`' for option in options)} | `{chosen}` |"
    yield ""


def _is_default(group: str, option: str) -> bool:
    return f"- {group}: {option}\n" in (CONFIG_DIR / f"{PPO.yaml}.yaml").read_text()


def _blocks(root: Root, cls: type[Block], path: str, doc: str = "", heading: str = "") -> Iterator[str]:
    """A heading and a table for the block, then the blocks below it; headings of one page are all different."""
    if path:
        yield f"{'#' * min(4, 2 + path.count('.'))} {heading}{path}\n"
        yield f"{doc}\n"
    else:
        yield f"## {heading}Top level\n"
    rows = [(name, entry) for name, entry in entries(cls).items() if entry.block is None]
    if rows:
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for name, entry in rows:
            yield _row(root, join(path, name), name, entry)
        yield ""
    for name, entry in entries(cls).items():
        if entry.block is not None:
            yield from _blocks(root, entry.block, join(path, name), entry.key.doc, heading)
        elif entry.named_blocks is not None:
            yield from _blocks(root, entry.named_blocks, join(path, f"{name}.<name>"), "Each of them.", heading)


def _row(root: Root, path: str, name: str, entry: Entry) -> str:
    # Blocks under names of the user's own are in no file of defaults: all their keys are null.
    default = _default(None if "<name>" in path else pick(default_tree(root=root.yaml), path))
    cells = (f"`{name}`", _type(entry.type), default, _meaning(root, path, entry))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(kind: Any) -> str:
    if kind is Any:
        return "any"
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return f"list of {_type(arguments[0])}"
    if typing.get_origin(kind) is dict:
        if isinstance(arguments[1], type) and issubclass(arguments[1], Block):
            return "named blocks"
        return "open mapping" if arguments[1] is Any else f"mapping of {_type(arguments[1])}"
    return _TYPES[kind]


def _default(value: Any) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value) if not isinstance(value, float) else format(value, 'g')}`"


def _meaning(root: Root, path: str, entry: Entry) -> str:
    key = entry.key
    parts = [key.doc]
    if key.choices:
        more = " or your own (`external_libs`)" if key.extendable else ""
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in key.choices)}{more}.")
    if range_words(key):
        parts.append(f"{range_words(key).capitalize()}.")
    if key.follows:
        parts.append(f"Null: as `{key.follows}`.")
    elif key.null:
        parts.append(f"Null: {key.null}.")
    if key.required:
        parts.append("**Required.**")
    others = [alias for alias, canonical in alias_table(root.cls).items() if canonical == path]
    if others:
        parts.append(f"Also: {', '.join(f'`{other}`' for other in others)}.")
    return " ".join(parts)


def _aliases(root: Root, heading: str = "") -> Iterator[str]:
    yield f"## {heading}Other spellings\n"
    yield "Both are accepted; set differently, they are a mistake. The log says what was read as what.\n"
    yield "| also accepted | is |"
    yield "|---|---|"
    for alias, canonical in sorted(alias_table(root.cls).items()):
        yield f"| `{alias}` | `{canonical}` |"
    yield ""


def _obsolete() -> Iterator[str]:
    yield "## Keys that are not needed\n"
    yield "Known from other versions of such scripts: accepted with a warning, and ignored.\n"
    yield "| key | why |"
    yield "|---|---|"
    for pattern, reason in OBSOLETE.items():
        yield f"| `{pattern}` | {reason} |"
    yield "\n## Keys with one value\n"
    yield "Known from other versions of such scripts: accepted at that value, any other is refused.\n"
    yield "| key | value | why |"
    yield "|---|---|---|"
    for path, fixed in FIXED.items():
        yield f"| `{path}` | `{fixed.value}` | {fixed.why} |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(render())
