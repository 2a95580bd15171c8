"""Packed attention and packed passes on a real GPU: equal to exact attention, and without waiting for the device."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.support.engine_cases import assert_close, engine_gradients, make_batch, make_engine, token_loss
from tests.support.tiny import tiny_model
from tests.unit.workers.engine.test_compiled_layers import batch
from verl.models.attention import grouped_attention, has_kernel, packed_attention
from verl.models.packing import Packing
from verl.workers.engine.base import MicroBatching

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LENGTHS = (1, 200, 37, 512, 64)


def packing_of(lengths):
    packing = Packing.from_lengths(lengths)
    return packing.with_starts(packing.cu_seqlens.to(CUDA))


def tensors(heads, kv, dim, dtype):
    torch.manual_seed(0)
    return [torch.randn(1, h, sum(LENGTHS), dim, device=CUDA, dtype=dtype, requires_grad=True) for h in (heads, kv, kv)]


def with_gradients(attend, inputs):
    out = attend(inputs)
    weight = torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out)
    return [out.detach().float(), *(g.float() for g in torch.autograd.grad((out * weight).sum(), inputs))]


def exact(inputs, window):
    query, key, value = (part[0].transpose(0, 1).float() for part in inputs)
    return grouped_attention(query, key, value, packing_of(LENGTHS), query.shape[-1] ** -0.5, window)[None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [(14, 2, 64), (8, 8, 128), (16, 4, 80)])
def test_the_kernel_is_near_exact_attention_in_values_and_gradients(heads, window, dtype):
    inputs = tensors(*heads, dtype)
    assert has_kernel(inputs[0], inputs[2], None)
    packing = packing_of(LENGTHS)
    found = with_gradients(
        lambda x: packed_attention(None, *x, None, sliding_window=window, packing=packing)[0], inputs
    )
    wanted = with_gradients(lambda x: exact(x, window), inputs)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_grouped_attention_on_the_gpu_is_that_of_the_cpu():
    inputs = tensors(6, 2, 32, torch.float32)
    for window, softcap in ((None, None), (50, None), (50, 2.0)):
        query, key, value = (part[0].transpose(0, 1) for part in inputs)
        found = grouped_attention(query, key, value, packing_of(LENGTHS), 0.2, window, softcap)
        wanted = grouped_attention(
            query.cpu(), key.cpu(), value.cpu(), Packing.from_lengths(LENGTHS), 0.2, window, softcap
        )
        torch.testing.assert_close(found.cpu(), wanted, atol=2e-3, rtol=2e-3)


def test_packed_attention_compiles_as_one_graph_for_changing_lengths():
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=True)
    inputs = tensors(14, 2, 64, torch.bfloat16)
    for lengths in (LENGTHS, (500, 314), (400, 400, 14)):
        packing = packing_of(lengths)
        wanted = packed_attention(None, *inputs, None, packing=packing)[0]
        torch.testing.assert_close(compiled(None, *inputs, None, packing=packing)[0], wanted)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_and_padded_engines_compute_and_learn_the_same(precision):
    data = make_batch(rows=8, prompt=40, response=90)
    found = {}
    for packed in (True, False):
        engine = make_engine(tiny_model(), mixed_precision=precision, use_remove_padding=packed)
        fields = dict(engine.infer(data, ["log_probs"], micro=MicroBatching(size=3)).batch.items())
        engine.forward_backward(data, token_loss, ["log_probs"], micro=MicroBatching(size=3))
        found[packed] = {**fields, **engine_gradients(engine)}
    if precision == "fp32":
        assert_close(found[True], found[False], tolerance=2e-3)
    else:
        for name, value in found[False].items():
            assert (found[True][name] - value).norm() < 0.05 * value.norm() + 1e-4, name


def test_compiled_layers_compute_and_learn_the_same_and_are_soon_compiled_for_good():
    found, compiled_after = {}, []
    for compiled in (True, False):
        engine = make_engine(tiny_model(), mixed_precision="bf16", compile_layers=compiled)
        torch._dynamo.utils.counters.clear()
        for rows in (8, 4, 6, 5, 7):  # passes of three sequences, of two and of one; other numbers of tokens each time
            data = make_batch(rows=rows, prompt=40, response=90)
            fields = dict(engine.infer(data, ["log_probs"], micro=MicroBatching(size=3)).batch.items())
            engine.forward_backward(data, token_loss, ["log_probs"], micro=MicroBatching(size=3))
            found[compiled] = {**fields, **engine_gradients(engine)}
            engine.optimizer_step()
            compiled_after.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # With gradient and without; again where a pass has a single sequence, and never after that.
    assert 2 <= compiled_after[1] == compiled_after[4] <= 4, compiled_after
    assert compiled_after[5:] == [0] * 5
    for name, value in found[False].items():
        assert (found[True][name] - value).norm() < 0.1 * value.norm() + 1e-4, name


def waits(work):
    """How often the host waits for the device."""
    work()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def test_the_host_does_not_wait_once_per_micro_batch():
    """Packed. With padding transformers itself looks at the mask in every pass."""
    data = make_batch(rows=8, prompt=20, response=30)
    engine = make_engine(tiny_model(), mixed_precision="bf16")

    def infer(size):
        return lambda: engine.infer(data, ["log_probs", "entropy"], micro=MicroBatching(size=size))

    def update(size):
        return lambda: engine.forward_backward(data, token_loss, ["log_probs"], micro=MicroBatching(size=size))

    assert waits(infer(1)) == waits(infer(8))
    assert waits(update(1)) == waits(update(8))


def test_compiled_layers_with_shared_prefixes_are_compiled_in_the_first_steps_only():
    """Also micro-batches of one row, which share nothing."""
    engine = make_engine(tiny_model(), mixed_precision="bf16", compile_layers=True, prefix_sharing="true")
    torch._dynamo.utils.counters.clear()
    graphs = []
    for step, (rows, size) in enumerate(((1, 1), (8, 3), (5, 8), (3, 2), (8, 8), (7, 1), (2, 2), (6, 4))):
        data, micro = batch(step, rows, 4), MicroBatching(size=size)
        engine.infer(data, ["log_probs"], micro=micro)
        engine.forward_backward(data, token_loss, ["log_probs"], micro=micro)
        engine.optimizer_step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[2:] == [graphs[2]] * 6, graphs
    assert graphs[2] <= 4, graphs
