"""docs/reference/metrics.md contains every metric that the code names and that a run recorded."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from tests.support.commands import ROOT
from verl.utils.tracking import SHORT_NAMES

PAGE = (ROOT / "docs/reference/metrics.md").read_text()
FOLDERS = ("trainer", "workers", "algos", "agent", "utils/tracking", "utils/console")
# Strings with a slash that are no metrics.
OTHER = re.compile(
    r"actor/huggingface|application/json|tokens/s|engine/<x>|training/failed_|(weights|moments|teacher|val_generations|dropped)/.*|<x>.*"
)
NAME = re.compile(r"[a-z_]+(?:-[a-z]+)?(?:/[\w@<>.]+)+")


def documented_names() -> list[str]:
    """The names in the first column of the tables."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def pattern(name: str) -> re.Pattern[str]:
    """`<x>` stands for any text, `{a,b}` for one of several."""
    escaped = re.escape(name).replace(r"\{", "(?:").replace(r"\}", ")").replace(",", "|")
    return re.compile(re.sub(r"<\w+>", ".+", escaped))


def names_in_code() -> set[str]:
    names = set()
    for path in itertools.chain.from_iterable((ROOT / "verl" / folder).rglob("*.py") for folder in FOLDERS):
        tree = ast.parse(path.read_text())
        parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                names.add("".join(v.value if isinstance(v, ast.Constant) else "<x>" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                names.add(node.value)
    return {name for name in names if NAME.fullmatch(name) and not OTHER.fullmatch(name)}


def undocumented(names: set[str]) -> list[str]:
    documented = documented_names()
    patterns = [pattern(name) for name in documented]

    def is_documented(name: str) -> bool:
        # A prefix of statistics ("critic/rewards") and a family ("async/<x>") are no metrics themselves.
        if any(known.fullmatch(name) or known.fullmatch(f"{name}/max") for known in patterns):
            return True
        return "<x>" in name and any(pattern(name).fullmatch(other) for other in documented)

    return sorted(name for name in names if not is_documented(name))


def test_every_metric_in_the_code_is_documented():
    names = names_in_code()
    assert {"reward/mean", "rollout_corr/kl", "async/queue_depth", "train/loss"} <= names
    assert undocumented(names) == []


def test_an_undocumented_metric_is_noticed():
    assert undocumented({"reward/mean", "reward/unheard_of", "val-core/a/b/reward/mean@4"}) == ["reward/unheard_of"]


@pytest.mark.parametrize(("metric", "short"), SHORT_NAMES.items())
def test_short_names_are_listed(metric, short):
    row = next(line for line in PAGE.partition("## Short names")[2].splitlines() if f"`{short}`" in line)
    assert f"`{metric}`" in row
