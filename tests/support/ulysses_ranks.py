"""What the ranks of a sequence-parallel group do in the tests; the processes import it by name."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tests.support.engine_cases import (
    OUTPUTS_OF_KIND,
    engine_gradients,
    fields_by_cut,
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
# Kind and model of each case: key heads from one to as many as query heads, a window, tied heads, all kinds.
MODELS = {
    "one key head": ("causal_lm", "qwen2", {"num_key_value_heads": 1}),
    "two key heads": ("causal_lm", "qwen2", {"tie_word_embeddings": True}),
    "four key heads": ("causal_lm", "llama", {"num_key_value_heads": 4}),
    "sliding window": ("causal_lm", "mistral", {"sliding_window": 5}),
    "adapters": ("causal_lm", "qwen2", {}),
    "value": ("value", "qwen2", {}),
    "scores": ("sequence_classification", "qwen2", {}),
}
# Query heads, key heads, size of a value: the last needs every key head four times.
HEADS = [(4, 1, 8), (4, 2, 8), (4, 4, 8), (8, 2, 8), (12, 3, 6)]


def ranks_at_work(rank, ranks, folder, names_by_size):
    """Everything the tests look at, in one start of the processes; rank r writes `found-<ranks>-r.pt`."""
    found = {"face": face(rank, ranks)}
    for size, names in names_by_size.items():
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        sharing = SequenceParallel(groups[rank // size], size, rank % size)
        found[size] = {"attention": [attention_gaps(sharing, *heads) for heads in HEADS]}
        found[size]["gathered"] = gathered(sharing)
        found[size]["refused"] = [refused(size, **changes) for changes in ({"heads": 9}, {"use_remove_padding": False})]
        for name in names:
            data = rows()[mine(rank, ranks, size)]
            found[size][name] = trained(name, data, sequence_parallel_size=size)
    torch.save(found, Path(folder) / f"found-{ranks}-{rank}.pt")


def rows():
    return make_batch(rows=5, prompt=9, response=12)


def mine(rank, ranks, size):
    """Which rows this rank's group has: of two groups not as many for each, nor as many micro-batches."""
    return slice(None) if size == ranks else [slice(0, 4), slice(4, 5)][rank // size]


# ---------------------------------------------------------------- engines


def trained(name, data, **changes):
    """What an engine finds before it learns, its gradients, and its weights after two steps."""
    kind, family, shape = MODELS[name]
    outputs = OUTPUTS_OF_KIND[kind]
    changes |= CHANGES | ({"lora_rank": 4} if name == "adapters" else {})
    model = model_of_kind(kind, family, **shape)
    engine = make_engine(model, kind, train=kind != "sequence_classification", **changes)
    found = {"place": (engine.dp_rank, engine.dp_size, engine.collects)}
    found |= fields_by_cut(engine, data, {"fixed": FIXED, "dynamic": DYNAMIC})
    if kind == "sequence_classification":
        return found
    found["metrics"] = engine.forward_backward(data, token_loss, outputs, 0.7, FIXED)
    found["gradients"] = {name: value.clone() for name, value in engine_gradients(engine).items()}
    found["norm"] = engine.optimizer_step()["grad_norm"]
    found["passes"] = engine.forward_backward(data, token_loss, outputs, 0.7, DYNAMIC)["loss"][1]
    engine.optimizer_step()
    found["weights"] = whole_weights(engine)
    return found


def refused(size, heads=4, **changes):
    """What the engine says to it."""
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=1, hidden_size=16 * heads)
    try:
        make_engine(model, sequence_parallel_size=size, **changes)
    except ValueError as error:
        return str(error)


# ---------------------------------------------------------------- parts


def attention_gaps(sharing, heads, key_heads, value_dim, tokens=10):
    """How far shared attention and its gradients are from one rank's."""
    draw = torch.Generator().manual_seed(heads + key_heads)
    total = sharing.padded(tokens)
    shapes = [(total, heads, 8), (total, key_heads, 8), (total, key_heads, value_dim)]
    whole = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    weight = torch.randn((total, heads, value_dim), generator=draw)
    wanted = attend(*whole)
    (wanted * weight).sum().backward()
    part = sharing.part(total)
    mine = [tensor.detach()[part].clone().requires_grad_() for tensor in whole]
    exchanged = sharing.exchange(*mine)
    assert exchanged[0].shape == (total, heads // sharing.size, 8)
    assert exchanged[1].shape == (total, math.lcm(key_heads, sharing.size) // sharing.size, 8)
    found = sharing.restore(attend(*exchanged))
    counts = [total // sharing.size] * sharing.size
    (sharing.gather(found, counts) * weight).sum().backward()
    gaps = [found - wanted[part], *(a.grad - b.grad[part] for a, b in zip(mine, whole, strict=True))]
    return max(float(gap.detach().abs().max()) for gap in gaps)


def attend(query, key, value):
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def gathered(sharing):
    """Rows of unequal numbers, none from the first rank; each rank gets the gradient of its own once."""
    counts = [2 * rank for rank in range(sharing.size)]
    mine = torch.full((max(1, counts[sharing.rank]), 3), float(sharing.rank), requires_grad=True)
    whole = sharing.gather(mine, counts)
    (whole * torch.arange(1.0, sum(counts) + 1)[:, None]).sum().backward()
    return whole.detach()[:, 0].tolist(), mine.grad[:, 0].tolist()


def face(rank, ranks):
    """The helpers under their public name, over all ranks: the parts, and what comes back."""
    ids, positions = torch.arange(1, 8)[None], torch.arange(7)[None]
    part, places, added = ulysses_pad_and_slice_inputs(ids, positions, sp_size=ranks)
    values = part.float().requires_grad_()
    whole = gather_outputs_and_unpad(values, gather_dim=1, padding_size=added)
    (whole * ids).sum().backward()
    return {"part": part, "places": places, "added": added, "whole": whole.detach(), "gradient": values.grad}
