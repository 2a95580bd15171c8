"""Weights of every layout come from Hugging Face files and go out under their names, bit for bit, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_cases import run_ranks
from tests.support.megatron_ranks import MODELS, WEIGHTS_ONLY, model_of
from tests.support.megatron_weight_ranks import BUCKET, RANKS, export_cases, measure_memory
from verl.models.loading import pretrained_model, read_config

pytestmark = pytest.mark.timeout(1800)
CASES = [
    ("DP4", "tied"),
    ("TP2", "qwen3"),
    ("PP2", "tied"),
    ("VPP2", "value"),
    ("TP2 PP2", "tied"),
    ("TP2 PP2", "qwen2"),
    ("TP2 CP2", "value"),
    ("TP2", "scores"),
    ("EP4", "experts"),
    ("TP2 EP2", "experts"),
    ("TP2 EP2 ETP2", "experts"),
    ("PP2 EP2", "experts"),
]
EVERY = pytest.mark.parametrize(("layout", "model"), CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[str, str]]) -> Path:
    place = tmp_path_factory.mktemp("weights")
    run_ranks(export_cases, place, cases, ranks=RANKS)
    return place


@EVERY
def test_buckets_have_every_weight_as_transformers_does(layout: str, model: str, folder: Path) -> None:
    """Whole on all ranks, some rows on each, all on one; in one bucket, in several, and in strips of single weights.

    Masters of a model in half precision are those of the files, which are float32, not what is left after rounding.
    """
    for found in _found(folder):
        case: dict[str, Any] = found[layout, model]
        assert case.pop("names")
        assert not any(case.values()), case
        assert len(case) == 9 + (model != "scores" and layout != WEIGHTS_ONLY)


@EVERY
def test_an_export_is_the_model_that_was_loaded(layout: str, model: str, folder: Path) -> None:
    stored = folder / "exported" / f"{layout}-{model}"
    back = pretrained_model(str(stored), read_config(str(stored)), MODELS[model][0]).state_dict()
    for name, value in model_of(model).state_dict().items():
        assert torch.equal(back[name], value), name


def test_no_rank_holds_more_than_its_shard_and_two_buckets(tmp_path: Path) -> None:
    """While it is filled from files, gives out whole weights or rows, saves, loads and exports."""
    run_ranks(measure_memory, tmp_path, ranks=RANKS)
    for found in _found(tmp_path):
        shard = found.pop("shard")
        assert shard > 4 * BUCKET
        assert found.keys() == {"fill", "whole", "rows", "save", "load", "export"}
        assert found["whole"] > BUCKET // 2
        assert {name: peak for name, peak in found.items() if peak > 2 * BUCKET} == {}


def _found(folder: Path) -> list[dict[Any, Any]]:
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(RANKS)]
