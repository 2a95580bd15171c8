"""Attention over prefix trees on a real GPU: every implementation is near exact attention, also in compiled layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engine_cases import assert_close, engine_gradients, make_engine, token_loss
from tests.support.prefix_cases import BATCHES, shared_batch
from tests.support.tiny import tiny_model
from verl.models.attention import expanded_attention, packed_attention
from verl.models.shared_prefixes import PrefixTree, TreePacking, gather_tokens
from verl.workers.engine.base import MicroBatching

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
VARIANTS = ("gather", "merge")
# Lengths of rows, and tokens shared with the row before.
TREES = {
    "groups": ([700, 650, 513, 1000, 900], [0, 300, 300, 0, 850]),
    "nested": ([300, 512, 600, 640, 200, 77], [0, 300, 400, 512, 1, 0]),
    "identical rows": ([256, 256, 130], [0, 256, 129]),
}


def packing_of(name, attention):
    lengths, shared = TREES[name]
    tree = PrefixTree(np.array(lengths), np.array(shared))
    packing = TreePacking(tree, np.concatenate(tree.paths), attention)
    return packing.with_starts(packing.cu_seqlens.to(CUDA))


def tensors(packing, heads, kv, dim, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [
        torch.randn(1, h, packing.total, dim, device=CUDA, dtype=dtype, requires_grad=True) for h in (heads, kv, kv)
    ]


def with_gradients(attend, inputs):
    out = attend(inputs)
    weight = torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out)
    return [out.detach().float(), *(g.float() for g in torch.autograd.grad((out * weight).sum(), inputs))]


def exact(inputs, packing, window=None):
    query, key, value = (part[0].transpose(0, 1).float() for part in inputs)
    return expanded_attention(query, key, value, packing, query.shape[-1] ** -0.5, window)[None]


def assert_near(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("heads", [(12, 2, 128), (8, 8, 64)])
def test_values_and_gradients_are_near_exact_attention(heads, name, attention):
    packing = packing_of(name, attention)
    inputs = tensors(packing, *heads)
    actual = with_gradients(lambda x: packed_attention(None, *x, None, packing=packing)[0], inputs)
    assert_near(actual, with_gradients(lambda x: exact(x, packing), inputs))


def test_windows_are_those_of_whole_rows():
    packing = packing_of("nested", "merge")
    inputs = tensors(packing, 8, 2, 64)
    actual = with_gradients(lambda x: packed_attention(None, *x, None, sliding_window=50, packing=packing)[0], inputs)
    assert_near(actual, with_gradients(lambda x: exact(x, packing, 50), inputs))


@pytest.mark.parametrize("attention", VARIANTS)
def test_it_compiles_as_one_graph_for_changing_trees(attention):
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=True)
    for name in TREES:
        packing = packing_of(name, attention)
        inputs = tensors(packing, 12, 2, 64)
        actual = with_gradients(lambda x, packing=packing: compiled(None, *x, None, packing=packing)[0], inputs)
        assert_near(actual, with_gradients(lambda x, packing=packing: exact(x, packing), inputs))


@pytest.mark.parametrize(
    ("attention", "precision"), [(None, "bf16"), (None, "fp32"), *((variant, "bf16") for variant in VARIANTS)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_engines_compute_the_same_with_and_without_sharing(attention, precision, compiled):
    engine = make_engine(tiny_model(), mixed_precision=precision, compile_layers=compiled)
    engine.prefix_sharing.attention = attention
    for name in BATCHES:
        data, results = shared_batch(name), []
        for mode in ("false", "true"):
            engine.prefix_sharing.mode = mode
            metrics = engine.forward_backward(data, token_loss, ["log_probs"], micro=MicroBatching(max_tokens=20))
            results.append(
                (metrics["loss"][0], {key: value.clone() for key, value in engine_gradients(engine).items()})
            )
            engine.optimizer.zero_grad()
        (plain_loss, plain), (loss, gradients) = results
        assert loss == pytest.approx(plain_loss, rel=0.02)
        largest = max(float(value.abs().max()) for value in plain.values())
        assert_close(gradients, plain, tolerance=0.03 * largest)


def test_the_gradient_of_a_token_in_many_rows_does_not_stagnate():
    """A sum of bfloat16 terms of 1 stops at 256."""
    x = torch.zeros(3, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    gather_tokens(x, torch.zeros(600, device=CUDA, dtype=torch.long), chunks=8).sum().backward()
    assert (x.grad[0] == 600).all()


def test_float32_has_no_kernel():
    assert make_engine(tiny_model(), mixed_precision="fp32", prefix_sharing="auto").prefix_sharing.mode == "false"
    assert make_engine(tiny_model(), mixed_precision="bf16", prefix_sharing="auto").prefix_sharing.mode == "auto"
    with pytest.raises(ValueError, match="use_prefix_grouper"):
        make_engine(tiny_model(), mixed_precision="fp32", prefix_sharing="true")
