"""Core's global state belongs to the layout at work, and to nobody in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as core_random

from verl.workers.engine.common.groups import ensure_process_group
from verl.workers.engine.megatron.layout import CoreLayout, ParallelSizes

CPU = torch.device("cpu")


@pytest.fixture
def layouts() -> Iterator[tuple[CoreLayout, CoreLayout]]:
    ensure_process_group(CPU)
    yield CoreLayout.get(ParallelSizes(), CPU), CoreLayout.get(ParallelSizes(expert_tensor=1), CPU)
    dist.destroy_process_group()


def test_each_layout_has_its_own_groups_and_buffers_and_leaves_none_behind(layouts):
    actor, critic = layouts
    assert not parallel_state.model_parallel_is_initialized()
    with actor.activate():
        buffer, tracker = parallel_state.get_global_memory_buffer(), core_random.get_cuda_rng_tracker()
        assert parallel_state.get_tensor_model_parallel_group() is actor.tp.group
        with critic.activate():
            assert parallel_state.get_tensor_model_parallel_group() is critic.tp.group
            assert parallel_state.get_global_memory_buffer() is not buffer
            assert core_random.get_cuda_rng_tracker() is not tracker
            with actor.activate():
                assert parallel_state.get_global_memory_buffer() is buffer
            assert parallel_state.get_tensor_model_parallel_group() is critic.tp.group
        assert core_random.get_cuda_rng_tracker() is tracker
    assert not parallel_state.model_parallel_is_initialized()


def test_what_changed_at_work_is_there_the_next_time_also_after_an_error(layouts):
    actor, critic = layouts

    def fails() -> None:
        with actor.activate():
            parallel_state.set_virtual_pipeline_model_parallel_rank(3)
            with critic.activate():
                raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fails()
    assert not parallel_state.model_parallel_is_initialized()
    with critic.activate():
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None
    with actor.activate():
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 3
        parallel_state.set_virtual_pipeline_model_parallel_rank(None)


def test_engines_of_equal_sizes_share_a_layout_of_one_process_group(layouts):
    actor, _ = layouts
    assert CoreLayout.get(ParallelSizes(), CPU) is actor
    dist.destroy_process_group()
    ensure_process_group(CPU)
    assert CoreLayout.get(ParallelSizes(), CPU) is not actor


def test_a_layout_does_not_touch_torchs_random_numbers():
    ensure_process_group(CPU)
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    CoreLayout(ParallelSizes(), CPU)
    assert torch.equal(torch.rand(4), wanted)
    dist.destroy_process_group()
