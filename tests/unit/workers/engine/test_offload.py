"""What leaves the device holds none of its memory, and comes back bit for bit. Here the device is a CPU as well."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common import offload
from verl.workers.engine.common.offload import HostBuffer, OffloadedGradients, OffloadedTensors

CPU = torch.device("cpu")


def train(engine, data, steps=1, **arguments):
    for _ in range(steps):
        engine.forward_backward(data, token_loss, ["log_probs"], **arguments)
        engine.optimizer_step()


def test_tensors_that_are_away_hold_no_memory_and_come_back_bit_for_bit():
    whole = torch.randn(12)
    tensors = [torch.randn(5, 3), whole[:7], whole[7:], torch.randn(3, dtype=torch.bfloat16), torch.empty(0)]
    wanted = [tensor.clone() for tensor in tensors]
    group = OffloadedTensors(CPU)
    group.offload(tensors)
    assert group.is_offloaded
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 5
    assert group.host.size == 15 * 4 + 12 * 4 + 3 * 2, "two views of one storage travel once"
    group.reload()
    group.wait()
    assert not group.is_offloaded
    assert all(torch.equal(found, value) for found, value in zip(tensors, wanted, strict=True))
    assert tensors[1].untyped_storage().data_ptr() == tensors[2].untyped_storage().data_ptr()


def test_host_memory_is_taken_once_and_used_again(monkeypatch):
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    group, tensors = OffloadedTensors(CPU), [torch.randn(50), torch.randn(3)]
    group.offload(tensors)
    first = [piece.data_ptr() for piece in group.host.pieces]
    for _ in range(2):
        group.reload()
        wanted = [tensor.mul_(2).clone() for tensor in tensors]
        group.offload(tensors)
    assert [piece.data_ptr() for piece in group.host.pieces] == first
    group.reload()
    assert all(torch.equal(found, value) for found, value in zip(tensors, wanted, strict=True))


def test_what_is_away_cannot_leave_again():
    group, tensors = OffloadedTensors(CPU), [torch.ones(3)]
    group.offload(tensors)
    with pytest.raises(RuntimeError, match=r"^offload: .*offloaded"):
        group.offload(tensors)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), piece=st.integers(1, 32))
def test_bytes_are_the_same_however_host_memory_is_cut(sizes, piece):
    before = offload.PIECE_BYTES
    offload.PIECE_BYTES = piece
    try:
        rows = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        buffer = HostBuffer(page_locked=False)
        buffer.ensure_size(sum(sizes) // 2)
        buffer.ensure_size(sum(sizes))
        assert buffer.size == sum(sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        for start, row in zip(starts, rows, strict=True):
            buffer.store(start, row)
        for start, row in zip(starts, rows, strict=True):
            found = torch.zeros_like(row)
            buffer.load(start, found)
            assert torch.equal(found, row)
    finally:
        offload.PIECE_BYTES = before


def test_a_sharded_model_and_its_moments_go_away_and_train_on_as_if_they_had_not():
    data = make_batch()
    stayed, moved = (make_engine(tiny_model(tie_word_embeddings=True)) for _ in range(2))
    weights, moments = OffloadedTensors(CPU), OffloadedTensors(CPU)
    for _ in range(3):
        train(stayed, data)
        train(moved, data)
        parameters = [*moved.model.parameters(), *moved.model.buffers()]
        weights.offload(parameters)
        moments.offload(moved.optimizer.state_tensors())
        held = [offload.local_shard(value).untyped_storage().nbytes() for value in parameters]
        held += [value.untyped_storage().nbytes() for value in moved.optimizer.state_tensors()]
        assert len(held) > 20
        assert not any(held)
        for group in (weights, moments):
            group.reload()
            group.wait()
    wanted, found = whole_weights(stayed), whole_weights(moved)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_after_a_pass_nothing_of_the_gathered_weights_is_left():
    data, engine = make_batch(), make_engine(tiny_model(), mixed_precision="bf16")
    train(engine, data)
    engine.infer(data, ["log_probs"])
    groups = [group for module in engine.model.modules() for group in _groups(module)]
    gathered = [tensor for group in groups for one in group.fsdp_params for tensor in one.all_gather_outputs]
    assert gathered
    assert not any(tensor.untyped_storage().nbytes() for tensor in gathered)
    assert not engine.optimizer.gradients()
    assert all(shard.untyped_storage().nbytes() == 0 for shard in engine.optimizer.shards.values())


def _groups(module):
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    return state._fsdp_param_groups if state is not None else []


@pytest.mark.parametrize("micro", [MicroBatching(size=1), MicroBatching(size=4)])
def test_gradients_summed_in_host_memory_equal_those_summed_on_the_device_bit_for_bit(micro):
    data = make_batch(rows=5)
    engines = [make_engine(tiny_model(), grad_offload=offloaded) for offloaded in (False, True)]
    waiting = []
    for engine in engines:
        engine.forward_backward(data, token_loss, ["log_probs"], micro=micro)
        waiting.append(len(engine.memory.gradients.offloaded))
        engine.memory.wait_ready()
    assert waiting[0] == 0
    assert waiting[1] > 20
    wanted, found = (engine_gradients(engine) for engine in engines)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for engine in engines:
        engine.optimizer_step()
        train(engine, data, micro=micro)
    wanted, found = (whole_weights(engine) for engine in engines)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_gradient_that_only_an_earlier_micro_batch_gave_is_not_lost():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    group = OffloadedGradients(parameters, CPU)
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.full((3,), 2.0)
    group.offload()
    assert all(parameter.grad is None for parameter in parameters)
    parameters[1].grad = torch.full((3,), 0.5)
    group.offload()
    parameters[1].grad = torch.full((3,), 0.25)
    group.reload()
    assert parameters[0].grad.tolist() == [1.0] * 3
    assert parameters[1].grad.tolist() == [2.75] * 3
    assert parameters[2].grad is None
