"""`verl list`: every registered name, one line each, with a description."""

from __future__ import annotations

import pytest

from verl.cli.listing import describe, render
from verl.cli.main import LIST_KINDS
from verl.config import names
from verl.utils.reward_score import known_data_sources

TABLES = {
    "estimators": names.ADV_ESTIMATORS,
    "losses": names.POLICY_LOSSES,
    "rewards": names.REWARD_MANAGERS,
    "loops": names.AGENT_LOOPS,
    "engines": {**names.ROLLOUTS, **names.TRAINING_ENGINES},
    "trackers": names.TRACKERS,
}


@pytest.mark.parametrize("kind", LIST_KINDS)
def test_every_name_has_a_line_with_a_description(kind):
    lines = {line.split()[0]: line.split(maxsplit=1) for line in render(kind).splitlines() if line.startswith("  ")}
    assert TABLES[kind].keys() <= lines.keys()
    assert all(len(parts) == 2 and len(parts[1]) > 10 for parts in lines.values())


def test_rewards_name_every_data_source():
    text = render("rewards")
    assert all(source in text for source in known_data_sources())


def test_descriptions_do_not_repeat_the_name():
    assert describe("verl.algos.advantage.gae:x").startswith("generalised advantage estimation")
    assert describe("verl.utils.tracking.services:Wandb", of_object=True).startswith("Weights & Biases")
    assert "Dr. GRPO" in describe("verl.algos.advantage.grpo:x")


def test_an_engine_that_is_not_installed_is_marked(monkeypatch):
    monkeypatch.setattr("verl.config.block_rules.is_installed", lambda package: package != "vllm")
    assert "[not installed: vllm]" in render("engines")
    assert "[not installed: sglang]" not in render("engines")
