"""Micro-batches by token budget give what fixed ones give: loss, gradients, metrics, log-probs; one rank and two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.dynamic_ranks import BATCHINGS, ROWS_BY_RANK, update_with_every_batching
from tests.support.engine_cases import assert_close, run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By number of ranks, what each of them found."""
    folder = tmp_path_factory.mktemp("cuts")
    run_ranks(update_with_every_batching, folder)
    update_with_every_batching(0, 1, folder)
    yield {
        ranks: [torch.load(folder / f"results-{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)]
        for ranks in (1, 2)
    }
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["fixed", "dynamic", "dynamic wide"])
def test_a_cut_by_tokens_changes_neither_gradients_nor_log_probs_nor_metrics(found, ranks, way):
    plain = found[1][0]["one by one"]
    for rank in range(ranks):
        assert_close(found[ranks][rank][way]["gradients"], plain["gradients"])
        inferred = plain["inferred"][ROWS_BY_RANK[ranks][rank]]
        torch.testing.assert_close(found[ranks][rank][way]["inferred"], inferred, atol=2e-5, rtol=1e-4)
    for name, (total, count) in plain["metrics"].items():
        totals, counts = zip(*(found[ranks][rank][way]["metrics"][name] for rank in range(ranks)), strict=True)
        assert sum(totals) == pytest.approx(total, rel=1e-4, abs=1e-4), name
        # Parts of the step's loss have no count, on any rank.
        assert set(counts) == {None} if count is None else sum(counts) == pytest.approx(count), name


@pytest.mark.parametrize("way", BATCHINGS)
def test_ranks_run_equally_many_passes_and_no_filler_while_there_are_rows(found, way):
    many, few = (found[2][rank][way]["passes"] for rank in range(2))
    assert sum(many) == 9
    assert sum(few) == 3
    assert len(few) == min(3, len(many)), "the rank with fewer tokens cuts them into as many parts as it has rows"


def test_the_budget_makes_fewer_passes_than_one_row_each(found):
    passes = {way: len(found[1][0][way]["passes"]) for way in BATCHINGS}
    assert passes["one by one"] == 12
    assert passes["dynamic wide"] < passes["dynamic"] < 12
