"""Shared prefixes on two ranks, which divide rows or the tokens of every row: results are those of one plain rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.engine_cases import assert_close, run_ranks
from tests.support.prefix_cases import policy_columns, shared_batch
from tests.support.prefix_ranks import KINDS, rows_of_rank, run_prefix_cases, train, train_policy
from verl.config.names import LOSS_AGG_MODES
from verl.workers.engine.base import MicroBatching

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefixes")
    run_ranks(run_prefix_cases, folder, ranks=2)
    return [torch.load(folder / f"prefixes-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    kinds = {kind: train(kind, shared_batch("groups"), MicroBatching()) for kind in KINDS}
    policy = train_policy(policy_columns(shared_batch("groups")), micro=MicroBatching())
    yield kinds | {mode: values for (_, mode), values in policy.items()}
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_two_ranks_have_the_policy_loss_and_gradients_of_one_in_every_aggregation(results, alone, mode, size):
    for by_case in results:
        assert_close(by_case[size, mode]["gradients"], alone[mode]["gradients"])
    losses = [by_case[size, mode]["loss"] for by_case in results]
    assert (sum(losses) if size == 1 else losses[0]) == pytest.approx(alone[mode]["loss"], rel=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_computes_without_sharing(results, alone, kind, size):
    expected = alone[kind]
    for rank, by_case in enumerate(results):
        found = by_case[size, kind]
        rows = rows_of_rank(rank, size)
        assert_close(found["fields"], {name: value[rows] for name, value in expected["fields"].items()})
        assert_close(found["gradients"], expected["gradients"])
    assert results[0][size, kind]["saving"][0] > 0
    losses = [by_case[size, kind]["loss"] for by_case in results]
    total = sum(losses) if size == 1 else losses[0]
    assert total == pytest.approx(expected["loss"], rel=1e-4)
