"""On a GPU: what is offloaded gives its memory back, comes back bit for bit, and host memory is locked once."""

import gc

import pytest
import torch

from tests.support.engine_cases import make_batch, make_engine, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.offload import CopyStream, HostBuffer, OffloadedTensors

pytestmark = pytest.mark.gpu

MB = 2**20
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


def train(engine, data, **arguments):
    engine.forward_backward(data, token_loss, ["log_probs"], **arguments)
    return engine.optimizer_step()


def test_nothing_of_an_offloaded_engine_stays_on_the_device():
    train(make_engine(tiny_model(**SIZES), mixed_precision="bf16"), make_batch())  # libraries take their workspaces
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    data, engine = make_batch(), make_engine(tiny_model(**SIZES), mixed_precision="bf16")
    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    train(engine, data)
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(12 * parameters, rel=0.05)
    engine.to("cpu", model=False)
    assert torch.cuda.memory_allocated() - before == pytest.approx(4 * parameters, rel=0.05)
    engine.to("cpu")
    # What remains is workspaces of libraries, not of the model.
    assert torch.cuda.memory_allocated() - before < 40 * MB
    reserved = torch.cuda.memory_reserved()
    assert reserved - before < 120 * MB, "the memory is given back to the device, not kept by the allocator"
    engine.to("device")
    assert train(engine, data)["skipped"] == 0


def test_an_engine_that_was_offloaded_trains_bit_for_bit_as_one_that_stayed():
    data = make_batch()
    engines = [make_engine(tiny_model(**SIZES), mixed_precision="bf16") for _ in range(2)]
    for _ in range(3):
        for moved, engine in enumerate(engines):
            if moved:
                engine.to("device")
            engine.forward_backward(data, token_loss, ["log_probs"])
            if moved:  # gradients go with the model
                engine.to("cpu")
                engine.to("device")
            engine.optimizer_step()
            if moved:
                engine.to("cpu")
    wanted, found = (whole_weights(engine) for engine in engines)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_gradients_that_wait_in_host_memory_leave_the_device_between_micro_batches():
    data = make_batch(rows=6)
    engines = [make_engine(tiny_model(**SIZES), grad_offload=offloaded) for offloaded in (False, True)]
    held = []
    for engine in engines:
        engine.forward_backward(data, token_loss, ["log_probs"], micro=MicroBatching(size=2))
        assert engine.optimizer.gradients()
        full = torch.cuda.memory_allocated()
        engine.memory.before_micro_batch()
        held.append(full - torch.cuda.memory_allocated())
        engine.optimizer_step()
    parameters = sum(parameter.numel() for parameter in engines[0].model.parameters())
    assert held[0] == 0
    assert held[1] == pytest.approx(4 * parameters, rel=0.05)
    wanted, found = (whole_weights(engine) for engine in engines)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_host_memory_is_page_locked_once():
    device = torch.device("cuda", torch.cuda.current_device())
    group, tensors = OffloadedTensors(device), [torch.randn(3 * MB, device=device), torch.randn(5, device=device)]
    wanted = [tensor.clone() for tensor in tensors]
    group.offload(tensors)
    pieces = [piece.data_ptr() for piece in group.host.pieces]
    assert all(piece.is_pinned() for piece in group.host.pieces)
    for _ in range(3):
        group.reload()
        group.wait()
        assert all(torch.equal(found, value) for found, value in zip(tensors, wanted, strict=True))
        group.offload(tensors)
    assert [piece.data_ptr() for piece in group.host.pieces] == pieces


def test_copies_wait_for_what_was_computed_before_and_are_waited_for_by_what_comes_after():
    device = torch.device("cuda", torch.cuda.current_device())
    value = torch.zeros(32 * MB, device=device)
    for _ in range(50):
        value += 1
    group = OffloadedTensors(device)
    group.offload([value])
    group.reload()
    group.wait()
    assert float((value * 2).min()) == float((value * 2).max()) == 100.0


def test_bf16_moments_train_on_a_gpu_and_take_half():
    data = make_batch()
    norms = {}
    for dtype in ("fp32", "bf16"):
        engine = make_engine(tiny_model(**SIZES), state_dtype=dtype, lr=1e-3)
        norms[dtype] = [train(engine, data)["grad_norm"] for _ in range(3)]
        moments = [value for value in engine.optimizer.state_tensors() if value.dim()]
        assert sum(value.nbytes for value in moments) == sum(
            2 * (4 if dtype == "fp32" else 2) * parameter.numel() for parameter in engine.model.parameters()
        )
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.02)


def test_a_buffer_without_a_gpus_stream_is_plain_memory():
    buffer, stream = HostBuffer(page_locked=False), CopyStream(torch.device("cpu"))
    buffer.ensure_size(10)
    with stream:
        buffer.store(0, torch.arange(10, dtype=torch.uint8))
    stream.wait()
    assert not buffer.pieces[0].is_pinned()
