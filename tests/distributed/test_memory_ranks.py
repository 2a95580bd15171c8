"""On two real ranks: prefetching, offloading and bf16 moments change no result."""

from __future__ import annotations

import pytest
import torch

from tests.support.engine_cases import run_ranks
from tests.support.memory_ranks import run_rank


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, folder)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_prefetching_layers_gives_the_same_gradients(found):
    for rank in range(2):
        assert same(found[rank]["prefetch-True"], found[rank]["prefetch-False"])


def test_padded_shards_leave_and_come_back_bit_for_bit(found):
    for rank in range(2):
        stayed, moved = found[rank]["offloaded"]
        assert same(stayed, moved)


def test_gradients_summed_in_host_memory_are_those_summed_on_the_device(found):
    for rank in range(2):
        assert found[rank]["waiting"] > 20
        assert same(found[rank]["grad_offload"], found[rank]["prefetch-True"])


def test_copies_of_the_same_weights_draw_the_same_noise(found):
    first, second = (found[rank]["replica"] for rank in range(2))
    assert first
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
