"""Worker functions of the tests of sequence parallelism (imported by name in the rank processes)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tests.support.engine_cases import (
    OUTPUTS_OF_KIND,
    engine_gradients,
    fields_by_batching,
    make_batch,
    make_engine,
    model_of_kind,
    token_loss,
    whole_weights,
)
from tests.support.tiny import tiny_model
from verl.models.ulysses import SequenceParallel
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs
from verl.workers.engine.base import MicroBatching

CHANGES = {"lr": 1e-3, "enable_gradient_checkpointing": True}
FIXED, DYNAMIC = MicroBatching(size=2), MicroBatching(max_tokens=15)
# Kind and model of each case: 1 to 4 KV heads, sliding window, tied embeddings, all kinds of heads.
MODELS = {
    "one key head": ("causal_lm", "qwen2", {"num_key_value_heads": 1}),
    "two key heads": ("causal_lm", "qwen2", {"tie_word_embeddings": True}),
    "four key heads": ("causal_lm", "llama", {"num_key_value_heads": 4}),
    "sliding window": ("causal_lm", "mistral", {"sliding_window": 5}),
    "adapters": ("causal_lm", "qwen2", {}),
    "value": ("value", "qwen2", {}),
    "scores": ("sequence_classification", "qwen2", {}),
}
# Query heads, KV heads, value dimension. In the last case, four ranks replicate every KV head four times.
HEADS = [(4, 1, 8), (4, 2, 8), (4, 4, 8), (8, 2, 8), (12, 3, 6)]


def run_cases(rank, ranks, folder, names_by_size):
    """All results that the tests check, computed in one process start; rank r writes `results-<ranks>-r.pt`."""
    results = {"public helpers": public_helpers(rank, ranks)}
    for size, names in names_by_size.items():
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        group = SequenceParallel(groups[rank // size], size, rank % size)
        results[size] = {"attention": [attention_gaps(group, *heads) for heads in HEADS]}
        results[size]["gathered"] = gather_uneven(group)
        results[size]["rejected"] = [
            rejection(size, **changes) for changes in ({"heads": 9}, {"use_remove_padding": False})
        ]
        for name in names:
            data = rows()[rows_of_group(rank, ranks, size)]
            results[size][name] = train_case(name, data, sequence_parallel_size=size)
    torch.save(results, Path(folder) / f"results-{ranks}-{rank}.pt")


def rows():
    return make_batch(rows=5, prompt=9, response=12)


def rows_of_group(rank, ranks, size):
    """Rows of this rank's group; two groups have different numbers of rows and micro-batches."""
    return slice(None) if size == ranks else [slice(0, 4), slice(4, 5)][rank // size]


# ---------------------------------------------------------------- engines


def train_case(name, data, **changes):
    """Outputs of an engine before training, its gradients, and its weights after two steps."""
    kind, family, shape = MODELS[name]
    outputs = OUTPUTS_OF_KIND[kind]
    changes |= CHANGES | ({"lora_rank": 4} if name == "adapters" else {})
    model = model_of_kind(kind, family, **shape)
    engine = make_engine(model, kind, train=kind != "sequence_classification", **changes)
    results = {"place": (engine.dp_rank, engine.dp_size, engine.collects)}
    results |= fields_by_batching(engine, data, {"fixed": FIXED, "dynamic": DYNAMIC})
    if kind == "sequence_classification":
        return results
    results["metrics"] = engine.forward_backward(data, token_loss, outputs, 0.7, FIXED)
    results["gradients"] = {name: value.clone() for name, value in engine_gradients(engine).items()}
    results["norm"] = engine.optimizer_step()["grad_norm"]
    results["passes"] = engine.forward_backward(data, token_loss, outputs, 0.7, DYNAMIC)["loss"][1]
    engine.optimizer_step()
    results["weights"] = whole_weights(engine)
    return results


def rejection(size, heads=4, **changes):
    """The engine's error message for this configuration."""
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=1, hidden_size=16 * heads)
    try:
        make_engine(model, sequence_parallel_size=size, **changes)
    except ValueError as error:
        return str(error)


# ---------------------------------------------------------------- collectives


def attention_gaps(group, heads, key_heads, value_dim, tokens=10):
    """Largest difference of attention and its gradients from those on one rank."""
    generator = torch.Generator().manual_seed(heads + key_heads)
    total = group.padded(tokens)
    shapes = [(total, heads, 8), (total, key_heads, 8), (total, key_heads, value_dim)]
    full = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    weight = torch.randn((total, heads, value_dim), generator=generator)
    expected = attend(*full)
    (expected * weight).sum().backward()
    part = group.part(total)
    local = [tensor.detach()[part].clone().requires_grad_() for tensor in full]
    exchanged = group.exchange(*local)
    assert exchanged[0].shape == (total, heads // group.size, 8)
    assert exchanged[1].shape == (total, math.lcm(key_heads, group.size) // group.size, 8)
    output = group.restore(attend(*exchanged))
    counts = [total // group.size] * group.size
    (group.gather(output, counts) * weight).sum().backward()
    gaps = [output - expected[part], *(a.grad - b.grad[part] for a, b in zip(local, full, strict=True))]
    return max(float(gap.detach().abs().max()) for gap in gaps)


def attend(query, key, value):
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def gather_uneven(group):
    """Gather different numbers of rows, none from the first rank; each rank receives the gradient of its own rows."""
    counts = [2 * rank for rank in range(group.size)]
    local = torch.full((max(1, counts[group.rank]), 3), float(group.rank), requires_grad=True)
    full = group.gather(local, counts)
    (full * torch.arange(1.0, sum(counts) + 1)[:, None]).sum().backward()
    return full.detach()[:, 0].tolist(), local.grad[:, 0].tolist()


def public_helpers(rank, ranks):
    """The public functions of verl.utils.ulysses over all ranks."""
    ids, positions = torch.arange(1, 8)[None], torch.arange(7)[None]
    part, sliced_positions, padding = ulysses_pad_and_slice_inputs(ids, positions, sp_size=ranks)
    values = part.float().requires_grad_()
    full = gather_outputs_and_unpad(values, gather_dim=1, padding_size=padding)
    (full * ids).sum().backward()
    return {
        "part": part,
        "positions": sliced_positions,
        "padding": padding,
        "gathered": full.detach(),
        "gradient": values.grad,
    }
