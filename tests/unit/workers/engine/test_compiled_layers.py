"""Compiled layers are compiled for the first passes only, whatever the packings of later ones.

CUDA kernels are replaced by operators on the CPU. The compiler treats both alike: it does not trace into them.
"""

from __future__ import annotations

import random
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._logging._internal import warning_once
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss
from tests.support.lora_cases import perturb_lora_b
from tests.support.tiny import tiny_model
from tests.unit.models.test_tree_attention import exact_backward, exact_forward
from verl.models import attention
from verl.models.shared_prefixes import TreePacking
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common import base_engine
from verl.workers.engine.common.base_engine import compile_each_layer, compiled_graphs
from verl.workers.engine.common.prefix_sharing import PrefixSharing

STEPS, SETTLED = 16, 3
layer_compile = nn.Module.compile


def sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, scale: float) -> Any:
    """Yield (queries, keys, values [heads, n, dim], probabilities) of each sequence, whose queries are the last tokens
    of its keys. q, k, v [tokens, heads, dim] with equal numbers of heads."""
    for (first, end), (key_first, key_end) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        queries = q[first:end].transpose(0, 1)
        keys, values = (part[key_first:key_end].transpose(0, 1) for part in (k, v))
        n, m = queries.shape[1], keys.shape[1]
        hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
        probabilities = (queries @ keys.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        yield (slice(first, end), slice(key_first, key_end)), queries, keys, values, probabilities


def repeated(part: torch.Tensor, heads: int) -> torch.Tensor:
    return part.repeat_interleave(heads // part.shape[1], dim=1)


@torch.library.custom_op("verl_test::attention", mutates_args=())
def attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    out, heads = torch.empty_like(q), q.shape[1]
    for (own, _), _, _, values, probabilities in sequences(
        q, repeated(k, heads), repeated(v, heads), cu_q, cu_k, scale
    ):
        out[own] = (probabilities @ values).transpose(0, 1)
    return out


@attention_op.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("verl_test::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    heads, kv_heads = q.shape[1], k.shape[1]
    grad_q, grad_k, grad_v = torch.zeros_like(q), *(torch.zeros_like(repeated(part, heads)) for part in (k, v))
    for (own, keys_of), queries, keys, values, probabilities in sequences(
        q, repeated(k, heads), repeated(v, heads), cu_q, cu_k, scale
    ):
        above = gradient[own].transpose(0, 1)
        scores = above @ values.mT
        scores = probabilities * (scores - (scores * probabilities).sum(-1, keepdim=True)) * scale
        grad_q[own] = (scores @ keys).transpose(0, 1)
        grad_k[keys_of] += (scores.mT @ queries).transpose(0, 1)
        grad_v[keys_of] += (probabilities.mT @ above).transpose(0, 1)
    grad_k, grad_v = (part.unflatten(1, (kv_heads, -1)).sum(2) for part in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


@attention_backward.register_fake
def _(gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.scale = inputs[7]


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    gradients = attention_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None, None, None, None


attention_op.register_autograd(backward, setup_context=save_inputs)


@pytest.fixture
def kernels(monkeypatch):
    """Attention of a GPU, and compilation without code generation."""

    def varlen(q: Any, k: Any, v: Any, *seqlens: Any, scale: float, window_size: Any, **_: Any) -> torch.Tensor:
        return attention_op(q, k, v, *seqlens, scale)

    initialise = TreePacking.__init__

    def with_arguments(self: TreePacking, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self.kernel_arguments = self._kernel_arguments()

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "flash_attn_varlen_func", None)
    monkeypatch.setattr(attention, "kernel_forward", exact_forward)
    monkeypatch.setattr(attention, "kernel_backward", exact_backward)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(TreePacking, "__init__", with_arguments)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(step: int, rows: int, group: int) -> DataProto:
    """Rows of random lengths; the prompts of each group are equal."""
    dice = random.Random(step)
    prompt = dice.randint(3, 30)
    data = make_batch(rows=rows, prompt=prompt, response=dice.randint(2, 30), seed=step)
    for row in range(rows):
        for name in ("input_ids", "attention_mask", "prompts"):
            data.batch[name][row, :prompt] = data.batch[name][row // group * group, :prompt]
    data.batch["position_ids"] = (data.batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return data


@pytest.mark.parametrize(
    ("checkpointing", "sharing"),
    [
        (True, "true"),
        pytest.param(False, "false", marks=pytest.mark.slow),
        pytest.param(False, "true", marks=pytest.mark.slow),
        pytest.param(True, "false", marks=pytest.mark.slow),
    ],
)
def test_no_pass_after_the_first_steps_compiles_again(checkpointing, sharing, kernels):
    """Among them passes of one sequence, and with shared prefixes micro-batches without any."""
    engine = make_engine(tiny_model(), enable_gradient_checkpointing=checkpointing)
    engine.prefix_sharing = PrefixSharing(sharing, engine.cost, compiled=True)
    engine.compile_layers()
    dice, before, graphs = random.Random(7), compiled_graphs(), []
    for step in range(STEPS):
        # First the special sizes, for which a compiler may generate code that is only valid for them.
        rows, size = (1, 1) if step == 0 else (dice.choice([1, 2, 3, 5, 8]), dice.choice([1, 2, 3, 8]))
        data, micro = batch(step, rows, dice.choice([1, 2, 4])), MicroBatching(size=size)
        engine.infer(data, ["log_probs"], micro=micro)
        engine.forward_backward(data, token_loss, ["log_probs"], micro=micro)
        engine.optimizer_step()
        graphs.append(compiled_graphs() - before)
    assert graphs[0] > 0
    assert graphs[SETTLED - 1 :] == [graphs[-1]] * (STEPS - SETTLED + 1), graphs
    assert graphs[-1] == 2, "with and without gradient"


def test_only_the_number_of_tokens_is_dynamic(kernels, monkeypatch):
    """Kernels of the rotary embedding would be slow if the size of a head was."""
    sizes = []

    def record(graph: Any, _inputs: Any) -> Any:
        inputs = (node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder")
        sizes.extend(value.shape for value in inputs if isinstance(value, torch.Tensor) and value.dim() > 1)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda layer, **_: layer_compile(layer, dynamic=True, backend=record))
    engine = make_engine(tiny_model())
    engine.compile_layers()
    engine.infer(batch(0, 2, 1), ["log_probs"], micro=MicroBatching(size=2))
    assert any(isinstance(size[1], torch.SymInt) for size in sizes), "the number of tokens"
    assert all(is_concrete_int(size[-1]) for size in sizes), sizes


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_layers_with_adapters_share_the_code(checkpointing, kernels):
    """The policy, its base weights and the update; also after changes of sizes."""
    engine = make_engine(tiny_model(num_hidden_layers=4), lora_rank=4, enable_gradient_checkpointing=checkpointing)
    engine.prefix_sharing, engine.compiled = PrefixSharing("true", engine.cost, compiled=True), True
    engine.compile_layers()
    before, graphs = compiled_graphs(), []
    for step, (rows, group) in enumerate(((1, 1), (8, 4), (5, 8), (3, 2))):
        data, micro = batch(step, rows, group), MicroBatching(size=3)
        data.meta_info["eager"] = True
        probed = engine.infer(data, ["log_probs"], micro=micro).batch["log_probs"]
        assert step or compiled_graphs() == before
        data.meta_info["eager"] = False
        torch.testing.assert_close(engine.infer(data, ["log_probs"], micro=micro).batch["log_probs"], probed)
        with engine.base_weights():
            engine.infer(data, ["log_probs"], micro=micro)
        engine.forward_backward(data, token_loss, ["log_probs"], micro=micro)
        engine.optimizer_step()
        graphs.append(compiled_graphs() - before)
    assert graphs == [3] * 4, "with and without adapters, and with gradient"


@pytest.mark.slow  # the operator alone: tests/unit/models/test_tree_attention.py
@pytest.mark.parametrize(("checkpointing", "rank"), [(True, 4), (True, 0), (False, 4), (False, 0)])
def test_compiled_trees_have_the_gradients_of_plain_rows(checkpointing, rank, kernels, monkeypatch, caplog):
    """Of the operator as the compiler differentiates it: with recomputation, but not of attention, and weights that
    have no gradient."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(_compile_by_aot))
    data, results, calls = batch(3, 6, 4), [], []
    monkeypatch.setattr(attention, "kernel_forward", lambda *args: (calls.append(args), exact_forward(*args))[1])
    warning_once.cache_clear()
    for sharing in ("false", "true"):
        engine = make_engine(tiny_model(seed=3), lora_rank=rank, enable_gradient_checkpointing=checkpointing)
        if rank:
            perturb_lora_b(engine)
        if sharing == "true":
            engine.prefix_sharing = PrefixSharing(sharing, engine.cost, compiled=True)
            engine.compile_layers()
        micro = MicroBatching(size=4)
        fields = engine.infer(data, ["log_probs"], micro=micro).batch["log_probs"]
        calls.clear()
        engine.forward_backward(data, token_loss, ["log_probs"], micro=micro)
        results.append({"log_probs": fields, **engine_gradients(engine)})
    assert len(calls) == 2 * engine.model.hf.config.num_hidden_layers, "micro-batches times layers"
    assert "context_fn" not in caplog.text, "advice of torch that does not apply"
    assert str(torch.ops.torch_attn._varlen_attn.default) in base_engine._ATTENTION_OPERATORS
    plain, compiled = results
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5)


class CheckpointedMLP(nn.Module):
    """A layer whose activations transformers would checkpoint."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden)))


@pytest.mark.parametrize("saves_relu", [False, True])
def test_the_backward_pass_recomputes_only_what_it_reads(monkeypatch, saves_relu):
    """Among the products of the backward pass is that of `up`, but not that of `down`. Outputs that are saved, like
    those of attention, are not recomputed."""
    products = []
    if saves_relu:
        monkeypatch.setattr(base_engine, "_ATTENTION_OPERATORS", {"aten.relu.default"})

    def count(graph: Any, _inputs: Any) -> Any:
        products.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)

    def compiled(module: nn.Module, dynamic: bool, options: Any) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    layer, hidden = CheckpointedMLP(), torch.randn(4, 8)
    layer(hidden).sum().backward()
    expected = {name: value.grad for name, value in layer.named_parameters()}
    layer.zero_grad()
    compile_each_layer([layer])
    layer(hidden.requires_grad_()).sum().backward()
    for name, value in layer.named_parameters():
        torch.testing.assert_close(value.grad, expected[name])
    assert products == [2, 4 if saves_relu else 1 + 4]
    torch._dynamo.reset()


@pytest.mark.slow  # generates code
def test_checkpointed_layers_are_cached_for_other_processes():
    torch._dynamo.reset()
    counters.clear()
    layer = CheckpointedMLP()
    compile_each_layer([layer])
    layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
    stages = counters["aot_autograd"]
    assert not stages["autograd_cache_bypass"]
    assert stages["autograd_cache_saved"] + stages["autograd_cache_hit"] == 1
    torch._dynamo.reset()


class MLPWithGraphBreak(CheckpointedMLP):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(hidden))
        torch._dynamo.graph_break()
        return self.down(hidden)


def test_the_parts_of_a_layer_with_a_graph_break_are_compiled(monkeypatch):
    """For example with Ulysses, or hooks of routers."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    layer, hidden = MLPWithGraphBreak(), torch.randn(4, 8, requires_grad=True)
    layer(hidden).sum().backward()
    expected = {name: value.grad for name, value in layer.named_parameters()}
    layer.zero_grad()
    compile_each_layer([layer])
    before = compiled_graphs()
    layer(hidden).sum().backward()
    for name, value in layer.named_parameters():
        torch.testing.assert_close(value.grad, expected[name])
    assert compiled_graphs() - before == 2, "before and after the break"
    torch._dynamo.reset()


def _compile_by_aot(module: nn.Module, dynamic: bool, options: Any) -> None:
    module._compiled_call_impl = torch.compile(module._call_impl, dynamic=dynamic, backend="aot_eager")


def test_compiled_passes_use_prefix_trees_for_all_rows_with_equal_results(kernels):
    data, results = batch(3, 5, 4), []  # four rows with a common prompt, and one with another
    for compiled in (False, True):
        engine = make_engine(tiny_model(seed=3))
        engine.prefix_sharing = PrefixSharing("true", engine.cost, compiled=compiled)
        packings = []
        apply = engine.prefix_sharing.apply

        def recorded(*args: Any, apply: Any = apply, packings: list[type] = packings) -> Any:
            rows = apply(*args)
            packings.append(type(rows.packing))
            return rows

        engine.prefix_sharing.apply = recorded
        fields = engine.infer(data, ["log_probs"], micro=MicroBatching(size=4)).batch["log_probs"]
        engine.forward_backward(data, token_loss, ["log_probs"], micro=MicroBatching(size=4))
        assert (len(set(packings)) == 1) is compiled
        results.append({"log_probs": fields, **engine_gradients(engine)})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6)
