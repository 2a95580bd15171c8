"""Triton kernels of the embedded engine against plain torch, on a real GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from verl.inference.low_rank import LowRankProduct
from verl.inference.models import torch_ops
from verl.utils.counter_noise import gumbel_noise
from verl.utils.weight_fingerprint import fingerprints, tensor_fingerprint

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PAGE, BLOCKS = 16, 64
LENGTHS = [1, 5, 37, 70, 130]
# (query heads, kv heads, head size): groups that are no power of two, and a head size that is none.
HEADS = [(14, 2, 64), (4, 4, 32), (32, 8, 128), (6, 2, 80)]
KINDS = [(None, None), (20, None), (None, 30.0)]


def attention(query, key, value, scale, window, softcap):
    """float32 reference: `query` [n, heads, dim] are the last tokens of `key`, `value` [length, kv, dim]."""
    count, heads, _ = query.shape
    length = len(key)
    key, value = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length - count, length, device=CUDA).unsqueeze(1)
    other = torch.arange(length, device=CUDA)
    visible = other <= position
    if window is not None:
        visible &= other > position - window
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~visible, -torch.inf).softmax(dim=-1), value)


class Cache:
    """Five sequences in blocks that lie in random order."""

    def __init__(self, kv: int, dim: int, dtype: torch.dtype) -> None:
        self.keys = torch.randn(BLOCKS, PAGE, kv, dim, device=CUDA, dtype=dtype)
        self.values = torch.randn_like(self.keys)
        order = torch.randperm(BLOCKS)
        self.tables = torch.zeros(len(LENGTHS), 16, dtype=torch.int32)
        used = 0
        for row, length in enumerate(LENGTHS):
            count = -(-length // PAGE)
            self.tables[row, :count] = order[used : used + count]
            used += count
        self.tables = self.tables.to(CUDA)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)

    def sequence(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(LENGTHS[row], device=CUDA)
        block = self.tables[row].long()[at // PAGE]
        return self.keys[block, at % PAGE], self.values[block, at % PAGE]


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    if tolerance is None:
        tolerance = 2e-2 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("window", "softcap"), KINDS)
@pytest.mark.parametrize(("heads", "kv", "dim"), HEADS)
@pytest.mark.parametrize("programs", [1, 512])
def test_decode_attention_is_attention(heads, kv, dim, window, softcap, dtype, programs, monkeypatch):
    """Also when several programs share a sequence, some of them without any of its tokens."""
    from verl.inference.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "WANTED_PROGRAMS", programs)
    torch.manual_seed(0)
    cache = Cache(kv, dim, dtype)
    query = torch.randn(len(LENGTHS), heads, dim, device=CUDA, dtype=dtype)
    found = paged_attention.decode_attention(
        query, cache.keys, cache.values, cache.tables, cache.lengths, dim**-0.5, window, softcap
    )
    for row in range(len(LENGTHS)):
        expected = attention(query[row : row + 1], *cache.sequence(row), dim**-0.5, window, softcap)
        assert_near(found[row : row + 1], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("window", "softcap"), KINDS)
@pytest.mark.parametrize(("heads", "kv", "dim"), HEADS)
def test_varlen_attention_is_attention_for_any_mix_of_pieces(heads, kv, dim, window, softcap, dtype):
    """Single tokens, whole prompts, last pieces; empty sequences and padding tokens at the end."""
    from verl.inference.kernels.paged_attention import varlen_attention

    torch.manual_seed(0)
    cache = Cache(kv, dim, dtype)
    counts = [1, 3, 37, 40, 1]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    query = torch.randn(starts[-1] + 5, heads, dim, device=CUDA, dtype=dtype)
    nobody = 2
    found = varlen_attention(
        query,
        cache.keys,
        cache.values,
        torch.tensor(starts + starts[-1:] * nobody, dtype=torch.int32, device=CUDA),
        torch.cat([cache.tables, cache.tables[:nobody]]),
        torch.cat([cache.lengths, cache.lengths[:nobody]]),
        dim**-0.5,
        window,
        softcap,
    )
    for row in range(len(LENGTHS)):
        here = slice(starts[row], starts[row + 1])
        assert_near(found[here], attention(query[here], *cache.sequence(row), dim**-0.5, window, softcap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_and_gate_are_those_of_torch(dtype):
    from verl.inference.kernels import pointwise

    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 96, device=CUDA, dtype=dtype)
    weight = torch.randn(96, device=CUDA, dtype=dtype)
    assert_near(pointwise.rms_norm(x, weight, 1e-6), torch_ops.rms_norm(x, weight, 1e-6).float())
    ours, theirs = residual.clone(), residual.clone()
    found, expected = (
        pointwise.add_rms_norm(x, ours, weight, 1e-6),
        torch_ops.add_rms_norm(x, theirs, weight, 1e-6),
    )
    assert_near(found, expected.float())
    assert torch.equal(ours, theirs)
    gate_up = torch.randn(5, 140, device=CUDA, dtype=dtype)
    assert_near(pointwise.gated_silu(gate_up), torch_ops.gated_silu(gate_up).float())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_is_that_of_torch_and_fills_the_cache(dtype, normed):
    from verl.inference.kernels.pointwise import rotate_and_cache

    torch.manual_seed(0)
    heads, kv, dim, tokens = 6, 2, 32, 7
    qkv = torch.randn(tokens, (heads + 2 * kv) * dim, device=CUDA, dtype=dtype)
    positions = torch.randint(0, 50, (tokens,), device=CUDA)
    angles = torch.arange(50, device=CUDA).unsqueeze(1) / 10000 ** (torch.arange(0, dim, 2, device=CUDA) / dim)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    weights = torch.rand(2, dim, device=CUDA, dtype=dtype) + 0.5
    norms = (weights[0], weights[1], 1e-6) if normed else None
    keys, values = torch.zeros(2, 4, 8, kv, dim, device=CUDA, dtype=dtype)
    slots = torch.randperm(32, device=CUDA)[:tokens]
    query, key, value = qkv.clone().view(tokens, -1, dim).split([heads, kv, kv], dim=1)
    if normed:
        query, key = torch_ops.rms_norm(query, weights[0], 1e-6), torch_ops.rms_norm(key, weights[1], 1e-6)
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    rotate_and_cache(qkv, positions, table, slots, keys, values, norms)
    assert_near(qkv.view(tokens, -1, dim)[:, :heads], torch_ops.rotated(query, cos, sin).float())
    assert_near(keys.view(-1, kv, dim)[slots], torch_ops.rotated(key, cos, sin).float())
    assert torch.equal(values.view(-1, kv, dim)[slots], value)
    assert keys.count_nonzero() <= tokens * kv * dim, "nothing else of the cache was written"


def with_product(
    tokens: int, outputs: list[int], rank: int, slots: int, dtype: torch.dtype, adapted: Sequence[int] | None = None
) -> tuple[torch.Tensor, LowRankProduct]:
    """Return the output [tokens, sum(outputs)] of a matmul of several layers, and the product of their adapters.

    With several slots, or `slots` -1 (one slot), each token uses one of them or none.

    `adapted`: the layers with adapters; default: all.
    """
    selects, slots = slots != 1, abs(slots)
    adapted = range(len(outputs)) if adapted is None else adapted
    wide = torch.randn(tokens, sum(outputs) + slots * len(adapted) * rank, device=CUDA, dtype=dtype)
    up = torch.randn(sum(outputs), slots, len(adapted), rank, device=CUDA, dtype=dtype) * 0.1
    layer_of_row = torch.arange(len(outputs), device=CUDA).repeat_interleave(torch.tensor(outputs, device=CUDA))
    other_layers = layer_of_row[:, None] != torch.tensor(adapted, device=CUDA)
    up.masked_fill_(other_layers[:, None, :, None], 0.0)
    unused = None
    if selects:
        used = torch.randint(-1, slots, (tokens, 1), device=CUDA)
        unused = (used != torch.arange(slots, device=CUDA)).unsqueeze(2)
    product = LowRankProduct(wide[:, sum(outputs) :], up.flatten(1), slots, len(adapted), unused)
    return wide[:, : sum(outputs)], product


def expected_sum(output: torch.Tensor, product: LowRankProduct) -> torch.Tensor:
    inner = product.inner.float()
    if product.unused is not None:
        inner = inner.unflatten(1, (product.slots, -1)).masked_fill(product.unused, 0.0).flatten(1)
    return output.float() + inner @ product.up.float().t()


# (tokens, rank, slots, whether the kernels add the product): fewer tokens than a tile and several tiles of each size;
# ranks below, at and above the size of a tile; one slot that only some tokens use (-1).
ADAPTED = [
    (5, 8, 1, True),
    (130, 24, 1, True),
    (70, 40, 1, True),
    (600, 96, 1, True),
    (40, 16, -1, True),
    (70, 32, 4, True),
    (40, 64, 3, False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "rank", "slots", "fused"), ADAPTED)
def test_adapters_are_added_before_the_norm_and_the_gate(tokens, rank, slots, fused, dtype):
    from verl.inference.kernels import lora, pointwise

    torch.manual_seed(0)
    size = 140
    x, product = with_product(tokens, [size], rank, slots, dtype)
    residual, weight = torch.randn(tokens, size, device=CUDA, dtype=dtype), torch.rand(size, device=CUDA, dtype=dtype)
    expected = residual.float() + expected_sum(x, product)
    assert lora.is_fused(product, layers=1) is fused
    found = pointwise.add_rms_norm(x, residual, weight, 1e-6, product)
    assert_near(residual, expected)
    assert_near(found, torch_ops.rms_norm(expected, weight.float(), 1e-6))

    gate_up, product = with_product(tokens, [size, size], rank, slots, dtype)
    expected = torch_ops.gated_silu(expected_sum(gate_up, product))
    assert lora.is_fused(product, layers=2) is fused
    assert_near(pointwise.gated_silu(gate_up, product), expected)


@pytest.mark.parametrize(("normed", "dim"), [(False, 64), (True, 128), (False, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "rank", "slots", "fused"), ADAPTED)
def test_adapters_are_added_before_the_rotation(tokens, rank, slots, fused, dtype, normed, dim):
    """Equal to the rotation of the sum, and nothing else of the cache is written."""
    from verl.inference.kernels import lora

    torch.manual_seed(0)
    heads, kv = 6, 2
    qkv, product = with_product(tokens, [heads * dim, kv * dim, kv * dim], rank, slots, dtype)
    assert lora.is_fused(product, layers=3) is fused
    assert_rotated(qkv, product, heads, kv, dim, normed)


def assert_rotated(qkv: torch.Tensor, product: LowRankProduct, heads: int, kv: int, dim: int, normed: bool) -> None:
    from verl.inference.kernels.pointwise import rotate_and_cache

    tokens, dtype = len(qkv), qkv.dtype
    total = expected_sum(qkv, product).to(dtype)
    positions, angles = torch.randint(0, 50, (tokens,), device=CUDA), torch.rand(50, dim // 2, device=CUDA)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = torch.rand(2, dim, device=CUDA, dtype=dtype) + 0.5
    norms = (weights[0], weights[1], 1e-6) if normed else None
    caches = torch.zeros(2, 2, 100, 8, kv, dim, device=CUDA, dtype=dtype)
    entries = torch.randperm(800, device=CUDA)[:tokens]
    rotate_and_cache(total, positions, table, entries, *caches[0], norms)
    rotate_and_cache(qkv, positions, table, entries, *caches[1], norms, product)
    # A sum that a matmul rounds to the next bfloat16 differs by up to 0.03 before the rotation.
    tolerance = 0.1 if dtype == torch.bfloat16 else 2e-5
    assert_near(qkv[:, : heads * dim], total[:, : heads * dim].float(), tolerance)
    assert_near(caches[1], caches[0].float(), tolerance)


@pytest.mark.parametrize("slots", [1, 3])
def test_adapters_of_some_layers_of_a_matmul_are_added(slots):
    """For example to queries and values only: the product is a matmul of its own."""
    from verl.inference.kernels import lora, pointwise

    torch.manual_seed(0)
    gate_up, product = with_product(20, [64, 64], 16, slots, torch.float32, adapted=[1])
    assert not lora.is_fused(product, layers=2)
    expected = torch_ops.gated_silu(expected_sum(gate_up, product))
    assert_near(pointwise.gated_silu(gate_up, product), expected)

    qkv, product = with_product(20, [6 * 32, 2 * 32, 2 * 32], 16, slots, torch.float32, adapted=[0, 2])
    assert not lora.is_fused(product, layers=3)
    assert_rotated(qkv, product, heads=6, kv=2, dim=32, normed=False)


def test_kernels_do_not_use_the_product_of_an_unused_adapter():
    """An adapter whose products overflow changes only the tokens that use it."""
    from verl.inference.kernels import pointwise

    torch.manual_seed(0)
    gate_up, product = with_product(20, [32, 32], 16, 2, torch.bfloat16)
    uses_second = ~product.unused[:, 1, 0]
    expected = pointwise.gated_silu(gate_up.clone(), product)
    product.inner[:, 32:] = torch.inf
    found = pointwise.gated_silu(gate_up, product)
    assert torch.equal(found[~uses_second], expected[~uses_second])
    assert not found[uses_second].isfinite().all()


@pytest.mark.parametrize("vocab", [37, 2048, 9001, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_pass_sampling_draws_what_the_noise_says(vocab, dtype):
    from verl.inference.kernels.sampling import sample_rows

    torch.manual_seed(0)
    rows = 16
    logits = torch.randn(rows, vocab, device=CUDA, dtype=dtype) * 3
    slots = torch.randperm(20, device=CUDA)[:rows]
    keys = torch.randint(-(2**62), 2**62, (20,), device=CUDA)
    temperature = torch.tensor([1.0, 0.7, 2.0, 0.5] * 5, device=CUDA).unsqueeze(1)
    greedy = torch.arange(20, device=CUDA) % 5 == 0
    positions = torch.arange(rows, device=CUDA) + 11
    found = sample_rows(logits, slots, positions, keys, temperature, greedy)
    scores = logits.float() / temperature[slots]
    noisy = scores + gumbel_noise(keys[slots], positions, vocab).masked_fill(greedy[slots].unsqueeze(1), 0.0)
    tokens = noisy.argmax(dim=-1)
    assert torch.equal(found.tokens, tokens)
    full = scores.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    raw = logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.log_probs, full, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.raw_log_probs, raw, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.drawn_log_probs, full.masked_fill(greedy[slots], 0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [37, 9001, 151_936])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_have_a_token_of_the_vocabulary_and_leave_the_others_alone(vocab, value):
    from verl.inference.kernels.sampling import sample_rows

    torch.manual_seed(0)
    rows = 8
    sound = torch.randn(rows, vocab, device=CUDA) * 3
    logits = sound.clone()
    logits[1], logits[3, vocab // 2], logits[5] = value, value, -torch.inf
    slots, keys = torch.arange(rows, device=CUDA), torch.arange(rows, device=CUDA) + 100
    temperature = torch.tensor([1.0, 0.7] * 4, device=CUDA).unsqueeze(1)
    for greedy in (torch.zeros(rows, dtype=torch.bool, device=CUDA), torch.ones(rows, dtype=torch.bool, device=CUDA)):
        arguments = (slots, slots + 11, keys, temperature, greedy)
        found, expected = sample_rows(logits, *arguments), sample_rows(sound, *arguments)
        assert bool(((found.tokens >= 0) & (found.tokens < vocab)).all())
        broken = torch.tensor([row in (1, 3, 5) for row in range(rows)], device=CUDA)
        assert torch.equal(found.log_probs.isfinite(), ~broken)
        for column, other in zip(found, expected, strict=True):
            assert torch.equal(column[~broken], other[~broken])


@pytest.mark.parametrize("vocab", [37, 9001, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_truncated_rows_draw_and_report_on_the_device_what_they_do_on_the_host(vocab, dtype):
    """Rows of all kinds in one step: cut off by each rule and by several, greedy, whole; and in a step of their own."""
    from verl.inference.sampler import Sampler
    from verl.types.request import SamplingParams

    torch.manual_seed(0)
    kinds = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.6, "min_p": 0.05}, {}]
    kinds += [{**kind, "temperature": 0.6} for kind in kinds] + [{"do_sample": False}, {"do_sample": False, "top_k": 3}]
    params = [(slot, SamplingParams(key=1000 + slot, **kind)) for slot, kind in enumerate(kinds)]
    logits = (torch.randn(len(kinds), vocab) * 3).to(dtype)
    slots, positions = list(range(len(kinds))), torch.arange(len(kinds)) + 11
    found = {}
    for device in (torch.device("cpu"), CUDA):
        sampler = Sampler(len(kinds), 64, device)
        sampler.assign(params)
        index = torch.tensor(slots, device=device)
        found[device.type] = sampler.sample(logits.to(device), slots, index, positions.to(device), ())
    assert torch.equal(found["cuda"].tokens.cpu(), found["cpu"].tokens)
    for name in ("log_probs", "raw_log_probs", "drawn_log_probs"):
        here, there = getattr(found["cpu"], name), getattr(found["cuda"], name).cpu()
        torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-4, msg=name)
    drawn, full = found["cuda"].drawn_log_probs, found["cuda"].log_probs
    assert (drawn[-2:] == 0).all(), "greedy rows"
    cut = torch.tensor([bool(set(kind) & {"top_k", "top_p", "min_p"}) for kind in kinds], device=CUDA)
    assert (drawn[cut] > full[cut]).all()
    # Whole rows alone go through the one-pass kernel, and report the same.
    whole = [slot for slot in slots if not cut[slot] and slot < len(kinds) - 2]
    at = torch.tensor(whole, device=CUDA)
    alone = sampler.sample(logits.to(CUDA)[at], whole, at, positions.to(CUDA)[at], ())
    assert torch.equal(alone.tokens, found["cuda"].tokens[at])
    torch.testing.assert_close(alone.drawn_log_probs, drawn[at], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_fingerprints_of_many_tensors_are_those_of_each(dtype):
    tensors = {
        str(i): (torch.randn(*shape, device=CUDA) * 100).to(dtype)
        for i, shape in enumerate([(3,), (16384,), (16385,), (100, 777), (0, 4)])
    }
    assert fingerprints(tensors) == {name: int(tensor_fingerprint(tensor)) for name, tensor in tensors.items()}


def test_a_region_gives_memory_back_and_takes_it_again_at_the_same_address():
    from verl.inference.memory import Region

    size = 2**30 + 5
    region = Region(size, CUDA)
    before, _ = torch.cuda.mem_get_info()
    address = region.bytes.data_ptr()
    region.bytes.fill_(7)
    region.release()
    assert torch.cuda.mem_get_info()[0] - before >= 2**30
    region.restore()
    assert region.bytes.data_ptr() == address
    region.bytes.fill_(9)
    assert int(region.bytes[-1]) == 9
    region.close()
    assert torch.cuda.mem_get_info()[0] - before >= 2**30


def test_penalised_and_biased_rows_draw_on_the_device_what_they_do_on_the_host():
    """Three steps, so that what was drawn is penalised too; a step without such rows takes the one-pass kernel."""
    from verl.inference.sampler import Sampler
    from verl.types.request import SamplingParams

    torch.manual_seed(0)
    vocab, prompts = 9001, [[1, 2, 3, 3], [5, 6], [7, 8, 9], [4]]
    kinds = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {},
        {"logit_bias": ((17, 30.0),)},
    ]
    params = [(slot, SamplingParams(key=slot, **kind)) for slot, kind in enumerate(kinds)]
    histories = [(slot, len(prompts[slot]), prompts[slot]) for slot, (_, one) in enumerate(params) if one.penalised]
    logits = torch.randn(3, len(kinds), vocab) * 3
    slots, found = list(range(len(kinds))), {}
    for device in (torch.device("cpu"), CUDA):
        sampler = Sampler(len(kinds), 64, device)
        sampler.assign(params, histories)
        index = torch.tensor(slots, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        found[device.type] = [
            sampler.sample(logits[step].to(device), slots, index, lengths + step, ()) for step in range(3)
        ]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert torch.equal(there.tokens.cpu(), here.tokens)
        assert here.tokens[3] == 17
        torch.testing.assert_close(there.drawn_log_probs.cpu(), here.drawn_log_probs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(there.log_probs.cpu(), here.log_probs, atol=1e-4, rtol=1e-4)
