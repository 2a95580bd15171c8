"""Checkpoints of every layout continue bit for bit on it, and on other layouts and engines as they would have there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from tests.support.engine_cases import run_ranks
from tests.support.megatron_weight_ranks import RANKS, checkpoint_cases, kill_during_save, load_core_checkpoint
from verl.utils.checkpoint.manifest import find_problems

pytestmark = pytest.mark.timeout(1800)
CASES = [
    ("TP2 PP2", "tied"),
    ("DP4", "tied"),
    ("TP2", "value"),
    ("VPP2", "qwen2"),
    ("DP4, whole optimizer", "qwen3"),
    ("TP2 EP2", "experts"),
]
OTHERS = ["DP4", "TP2 PP2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[str, str]]) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(checkpoint_cases, folder, cases, OTHERS, ranks=RANKS)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_a_checkpoint_continues(layout: str, model: str, found: list[dict[Any, Any]]) -> None:
    """Weights, moments, schedule and random states; saved while training went on."""
    for case in (each[layout, model] for each in found):
        assert {name for name, names in case["loaded"].items() if names} == set()
        assert case["loaded"].keys() == case["steps"].keys() == {layout, *OTHERS, "fsdp", "from fsdp"}
        assert case["same numbers"]
        assert case["steps"].pop(layout) == 0.0
        assert max(case["steps"].values()) < 2e-5


@pytest.mark.parametrize(("saved_layout", "saved_model"), [("TP2 PP2", "tied"), ("TP2 EP2", "experts")])
def test_weights_that_core_wrote_are_read_on_another_layout(
    saved_layout: str, saved_model: str, tmp_path: Path
) -> None:
    run_ranks(load_core_checkpoint, tmp_path, saved_model, saved_layout, ranks=RANKS)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"results-{rank}.pt", weights_only=False)
        assert found["loaded"] == []
        assert found["steps"] < 2e-5


def test_a_rank_killed_in_a_save_leaves_the_step_before(tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException):
        run_ranks(kill_during_save, tmp_path, ranks=RANKS)
    assert find_problems(tmp_path / "global_step_1") == []
    assert "never finished" in find_problems(tmp_path / "global_step_2")[0]
