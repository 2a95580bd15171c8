"""Attention over prefix trees equals attention of every row alone, in values and gradients, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.models.test_attention import one_sequence
from verl.models import attention
from verl.models.shared_prefixes import PrefixTree, TreePacking, gather_tokens
from verl.workers.engine.common.base_engine import compiled_graphs

TREES = {
    "a group": ([9, 7, 9, 8], [0, 5, 5, 5]),
    "nested": ([3, 8, 9, 9, 6, 4], [0, 3, 5, 7, 2, 0]),
    "identical rows": ([5, 5, 5], [0, 5, 5]),
    "nothing shared": ([4, 2, 6], [0, 0, 0]),
    "one shared token": ([4, 7], [0, 1]),
    "a row that begins the next": ([4, 7, 9], [0, 4, 7]),
}


@st.composite
def trees(draw):
    lengths, shared = [draw(st.integers(1, 12))], [0]
    for _ in range(draw(st.integers(0, 6))):
        shared.append(draw(st.integers(0, lengths[-1])))
        lengths.append(max(1, shared[-1] + draw(st.integers(0, 6))))
    return lengths, shared


def packing_of(lengths, shared):
    tree = PrefixTree(np.array(lengths), np.array(shared))
    return TreePacking(tree, np.concatenate(tree.paths), "merge")


def inputs_of(packing):
    torch.manual_seed(0)
    return [torch.randn(packing.total, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


def with_gradients(out, inputs):
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)]


def row_by_row(query, key, value, packing, window=None, softcap=None):
    tree, parts = packing.tree, []
    for path, shared in zip(tree.paths, tree.shared, strict=True):
        path = torch.from_numpy(path)
        parts.append(one_sequence(query[path], key[path], value[path], 0.3, window, softcap)[shared:])
    return torch.cat(parts)


def check(attend, packing, **options):
    inputs = inputs_of(packing)
    actual = with_gradients(attend(*inputs), inputs)
    expected = with_gradients(row_by_row(*inputs, packing, **options), inputs)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5)])
def test_whole_rows(name, window, softcap):
    packing = packing_of(*TREES[name])
    # Softcapping computes the softmax in float32.
    if softcap is None:
        check(lambda *x: attention.tree_attention(*x, packing, 0.3, window), packing, window=window)
    else:
        inputs = inputs_of(packing)
        actual = with_gradients(attention.tree_attention(*inputs, packing, 0.3, window, softcap), inputs)
        expected = with_gradients(row_by_row(*inputs, packing, window, softcap), inputs)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(tree=trees())
def test_random_trees_of_whole_rows(tree):
    packing = packing_of(*tree)
    check(lambda *x: attention.expanded_attention(*x, packing, 0.3), packing)


# ---------------------------------------------------------------- implementations around CUDA kernels


def exact_forward(query, key, value, seqlens, causal, scale, left=-1):
    """What the variable-length kernel computes: attention and its log-sum-exp, per sequence."""
    outs, lses = [], []
    for q, k, v in sequences(seqlens, query, key, value):
        scores = scores_of(q, k, causal, scale, left)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated(v, q)))
    return torch.cat(outs), torch.cat(lses, dim=1)


def exact_backward(gradient, query, key, value, out, lse, seqlens, causal, scale, left=-1):
    """What its backward pass computes from a log-sum-exp and an output."""
    results = []
    for q, k, v, dO, o, at in sequences(seqlens, query, key, value, gradient, out, lse.transpose(0, 1)):
        p = torch.exp(scores_of(q, k, causal, scale, left) - at.transpose(0, 1)[..., None])
        dp = torch.einsum("qhd,khd->hqk", dO, repeated(v, q))
        ds = p * (dp - (dO * o).sum(-1).transpose(0, 1)[..., None]) * scale
        dq = torch.einsum("hqk,khd->qhd", ds, repeated(k, q))
        dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, dO)
        results.append((dq, *(part.unflatten(1, (k.shape[1], -1)).sum(2) for part in (dk, dv))))
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def sequences(seqlens, query, key, value, *of_queries):
    cu_q, cu_k = (starts.tolist() for starts in seqlens[:2])
    for i in range(len(cu_q) - 1):
        q, k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        yield query[q], key[k], value[k], *(part[q] for part in of_queries)


def repeated(x, query):
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def scores_of(query, key, causal, scale, left):
    scores = torch.einsum("qhd,khd->hqk", query, repeated(key, query)) * scale
    if not causal:
        return scores
    # The mask is aligned to the last query and the last key.
    offset = key.shape[0] - query.shape[0]
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(offset)
    seen = seen if left < 0 else seen.triu(offset - left)
    return scores.masked_fill(~seen, -torch.inf)


@pytest.fixture
def exact_kernels(monkeypatch):
    """Kernels for any dtype and device."""
    monkeypatch.setattr(attention, "kernel_forward", exact_forward)
    monkeypatch.setattr(attention, "kernel_backward", exact_backward)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)


def kernel_packing(lengths, shared, method):
    """The packing of a tree as on a GPU."""
    tree = PrefixTree(np.array(lengths), np.array(shared))
    packing = TreePacking(tree, np.concatenate(tree.paths), method)
    packing.kernel_arguments = packing._kernel_arguments()
    return packing


@pytest.mark.parametrize(("method", "window"), [("gather", None), ("gather", 3), ("merge", None), ("merge", 3)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees())
def test_kernels_have_exact_values_and_gradients(exact_kernels, tree, method, window):
    packing = kernel_packing(*tree, method)
    queries = packing.kernel_arguments.parts().prefix_queries.tolist()
    assert len(set(queries)) == len(queries)
    check(lambda *x: attention.tree_attention(*x, packing, 0.3, window), packing, window=window)


def test_the_operator_is_consistent(exact_kernels):
    for method in ("gather", "merge"):
        packing = kernel_packing(*TREES["nested"], method)
        arguments = (*inputs_of(packing), *packing.kernel_arguments, 0.3, -1)
        torch.library.opcheck(attention.tree_kernel, arguments, raise_exception=True)
        out, lse = attention.tree_kernel(*arguments)
        assert (out.requires_grad, lse.requires_grad) == (True, False), "there is no gradient of the log-sum-exp"


def test_one_compiled_graph_computes_any_tree(exact_kernels):
    """Copied keys, merged parts, and trees of any size."""
    torch._dynamo.reset()
    before = compiled_graphs()
    compiled = torch.compile(attention.tree_attention, backend="aot_eager", dynamic=True, fullgraph=True)
    for name in TREES:
        for method in ("gather", "merge"):
            packing = kernel_packing(*TREES[name], method)
            check(lambda *x, packing=packing: compiled(*x, packing, 0.3), packing)
    assert compiled_graphs() == before + 1


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_gradients_of_shared_tokens_are_summed_in_float32_and_rounded_once(chunks):
    x = torch.randn(4, 6, 5, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0, 2, 2, 3] * 150)
    gradient = torch.rand(600, 6, 5).bfloat16()
    out = gather_tokens(x, index, chunks)
    assert torch.equal(out, x[index])
    (found,) = torch.autograd.grad(out, x, gradient)
    expected = torch.zeros(4, 6, 5, dtype=torch.float64).index_add_(0, index, gradient.double())
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=0)


def test_many_short_branches_of_a_long_prefix_are_not_gathered():
    def selected(prefix, answers, suffix):
        tree = PrefixTree(np.full(answers, prefix + suffix), np.array([0] + [prefix] * (answers - 1)))
        return TreePacking(tree, np.concatenate(tree.paths)).attention

    assert selected(128, 8, 256) == selected(4096, 4, 4096) == "gather"
    assert selected(4096, 16, 512) == "merge"
