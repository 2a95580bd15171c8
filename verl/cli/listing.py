"""`verl list KIND`: names that configuration keys accept, one line each with a description.

Names come from the extension tables of `verl.config.names`; descriptions are the first sentence of the docstring of the
file, or of the class where a file declares several. The files are parsed, not imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.cli.main import LIST_KINDS, unknown_name

_VERL = Path(__file__).parents[1]
# "`grpo`: …" or "ToolAgentLoop: …" at the start of a docstring repeats the name.
_LEADING_NAME = re.compile(r"^(`[^`]+`|\w+): ")
_FIRST_SENTENCE = re.compile(r"^.+?(?<!Dr)\.(?=\s|$)")


@dataclass(frozen=True)
class Item:
    """A listed name."""

    name: str
    description: str


@dataclass(frozen=True)
class Section:
    """Names that one configuration key (or data column) accepts."""

    title: str
    key: str
    items: Callable[[], Iterator[Item]]


def main(arguments: Sequence[str]) -> int:
    """Print the names of a kind; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl list", description="List the names that configuration keys accept.")
    parser.add_argument("kind", metavar="KIND", nargs="?", help=", ".join(LIST_KINDS))
    kind = parser.parse_args(arguments).kind
    if kind is None:
        parser.print_help()
        return 2
    if kind not in LIST_KINDS:
        sys.stderr.write(unknown_name("list", kind, LIST_KINDS))
        return 2
    sys.stdout.write(render(kind))
    return 0


def render(kind: str) -> str:
    """Return the lines of all sections of a kind."""
    lines: list[str] = []
    for section in _sections()[kind]:
        items = list(section.items())
        column = max(len(item.name) for item in items) + 2
        lines += [*([""] if lines else []), f"{section.title} ({section.key})"]
        lines += [f"  {item.name:<{column}}{item.description}" for item in items]
    return "\n".join(lines) + "\n"


def _sections() -> dict[str, tuple[Section, ...]]:
    """Return the sections of every kind in `LIST_KINDS`."""
    from verl.config import names

    def table_section(title: str, key: str, table: Mapping[str, Any], of_object: bool = False) -> Section:
        return Section(title, key, lambda: _extensions(table, of_object))

    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "estimators": (table_section("advantage estimators", "algorithm.adv_estimator", names.ADV_ESTIMATORS),),
        "losses": (table_section("policy losses", f"{actor}.policy_loss.loss_mode", names.POLICY_LOSSES),),
        "rewards": (
            Section("reward functions", "by data_source, or custom_reward_function.path", _reward_functions),
            table_section("reward managers", "reward_model.reward_manager", names.REWARD_MANAGERS, of_object=True),
        ),
        "loops": (
            table_section("agent loops", f"{rollout}.agent.default_agent_loop, column agent_name", names.AGENT_LOOPS),
        ),
        "engines": (
            table_section("rollout engines", f"{rollout}.name", names.ROLLOUTS),
            Section("training engines", f"{actor}.strategy", _training_engines),
        ),
        "trackers": (table_section("trackers", "trainer.logger", names.TRACKERS, of_object=True),),
    }


def _extensions(table: Mapping[str, Any], of_object: bool) -> Iterator[Item]:
    for name, traits in sorted(table.items()):
        yield Item(name, describe(traits.import_path, of_object) + _availability(getattr(traits, "package", None)))


def _training_engines() -> Iterator[Item]:
    from verl.config.names import TRAINING_ENGINES

    for name, engine in TRAINING_ENGINES.items():
        yield Item(name, describe(engine.import_path) + _availability(engine.package))


def _reward_functions() -> Iterator[Item]:
    from verl.utils.reward_score import known_data_sources, score_function

    sources: dict[str, list[str]] = {}
    for source in known_data_sources():
        sources.setdefault(score_function(source).compute.__module__, []).append(source)
    for module, names in sorted(sources.items()):
        yield Item(module.rpartition(".")[2], f"{describe(module)}. data_source: {', '.join(names)}")


def _availability(package: str | None) -> str:
    """Return a note if the package is not installed."""
    from verl.config.block_rules import is_installed

    return "" if is_installed(package or "") else f" [not installed: {package}]"


def describe(import_path: str, of_object: bool = False) -> str:
    """Return the first docstring sentence of the file of `module:attribute`; with `of_object`, of the attribute."""
    module, _, attribute = import_path.partition(":")
    tree = ast.parse(_source_file(module).read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    if of_object:
        named = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        docstring = next((ast.get_docstring(node) for node in named if node.name == attribute), docstring)
    return _first_sentence(docstring or "")


def _source_file(module: str) -> Path:
    path = _VERL.parent.joinpath(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def _first_sentence(docstring: str) -> str:
    text = _LEADING_NAME.sub("", " ".join(docstring.split("\n\n")[0].split()))
    match = _FIRST_SENTENCE.match(text)
    return (match[0] if match else text).rstrip(".")
