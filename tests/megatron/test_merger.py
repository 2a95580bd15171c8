"""Checkpoints of Megatron ranks, ours and Core's own, merged in a process that has no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_cases import run_ranks
from tests.support.megatron_merger_ranks import write_checkpoints
from tests.support.megatron_ranks import RANKS
from tests.support.merger_cases import assert_holds, merge, tensors

pytestmark = pytest.mark.timeout(1800)
CASES = [("TP2 PP2", "tied"), ("TP2", "qwen3"), ("TP2 EP2", "experts")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("merger")
    run_ranks(write_checkpoints, found, CASES, ranks=RANKS)
    return found


@pytest.mark.parametrize("name", [name for _, name in CASES])
@pytest.mark.parametrize("whose", ["ours", "core"])
@pytest.mark.usefixtures("logging_as_before")
def test_a_checkpoint_of_any_layout_becomes_the_model(whose: str, name: str, folder: Path) -> None:
    target = folder / f"{name}-{whose}"
    assert merge(folder / name / whose, target, backend="megatron") == 0
    assert_holds(target, tensors(folder / name / "model"))
