"""docs/start/migrating.md: the keys of both columns compose, and keys of other releases have the stated meaning."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import ROOT, compose_config

PAGE = (ROOT / "docs/start/migrating.md").read_text()
BASE = [
    "-m",
    "verl.trainer.main_ppo",
    "algorithm=grpo",
    "data.train_files=a.parquet",
    "actor_rollout_ref.model.path=org/model",
]


def rows(heading: str) -> list[tuple[str, str]]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(left.removeprefix("| "), right) for left, right, _ in cells]


def overrides(cell: str) -> list[str]:
    return [word for quoted in re.findall(r"`([^`]+)`", cell) for word in quoted.split()]


def composed(words: list[str]) -> dict:
    return compose_config([*BASE, *words]).to_dict()


@pytest.mark.parametrize(("elsewhere", "here"), rows("From another verl release"))
def test_a_key_of_another_release_is_the_key_here(elsewhere, here):
    left, right = overrides(elsewhere), overrides(here)
    assert left
    assert right or here == "no key"
    assert composed(left) == composed(right)
    assert (composed(left) != composed([])) == bool(right), "the example must change a value"


@pytest.mark.parametrize(("elsewhere", "here"), rows("SFT of another release"))
def test_a_key_of_another_sft_program_is_the_key_here(elsewhere, here):
    def composed_sft(words: list[str]) -> dict:
        defaults = ["data.train_files=a.parquet", "model.path=org/model"]
        if any("model.p" in word for word in words):
            defaults.pop()
        return compose_config(["-m", "verl.trainer.main_sft", *defaults, *words]).to_dict()

    left, right = overrides(elsewhere), overrides(here)
    assert composed_sft(left) == composed_sft(right)
    assert (composed_sft(left) != composed_sft([])) == bool(right), "the example must change a value"


@pytest.mark.parametrize(("elsewhere", "here"), rows("From TRL"))
def test_the_keys_for_a_setting_of_trl_compose(elsewhere, here):
    words = overrides(here)
    assert words or here == "no key"
    config = compose_config([*BASE, *words])
    assert [notice for notice in config.notices if "no effect" in notice] == []
