"""The tables of docs/guides/large_models.md: layouts of large models on many GPUs, by the formulas of the memory plan.

python benchmarks/scaling_layouts.py [--device-gb 80] [--length 4096] [--sequences 512]

For every model and number of GPUs: fsdp over all of them, and the megatron layout that fits and is fastest by the
estimate below. Everything is calculated; nothing is executed.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.config.megatron import split_evenly
from verl.planning.fsdp import FSDPModelMemory
from verl.planning.megatron import MegatronModelMemory
from verl.planning.phases import GB, PhaseMemory
from verl.planning.shapes import CoreShape, MegatronLayout, ModelShape

WORLDS = (8, 16, 32, 64, 128, 256, 512)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Assumptions for selecting a layout: FLOP/s of a GPU, bytes/s within a node and between nodes, GPUs per node.
SPEED, INSIDE, BETWEEN, NODE = 400e12, 350e9, 40e9, 8
CONTEXT = 1.0 * GB


def dense(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> CoreShape:
    """Return the shape of a Qwen2.5 model: head size 128, biases for queries, keys and values."""
    query, key = 128 * heads, 128 * kv_heads
    attention = (2 * query + 2 * key) * hidden + query + 2 * key
    return CoreShape(layers, hidden, heads, query, key, ffn, vocab, False, attention, 2 * hidden)


MODELS = {
    "Qwen2.5-7B": dense(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-32B": dense(5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": dense(8192, 80, 64, 8, 29568, 152064),
    "Qwen3-235B-A22B": CoreShape(
        **{"layers": 94, "hidden": 4096, "heads": 64, "query_width": 8192, "key_width": 512, "ffn": 12288},
        **{"vocab": 151936, "tied": False, "attention": (2 * 8192 + 2 * 512) * 4096, "replicated": 2 * 4096 + 256},
        **{"head_norms": True, "sparse": (True,) * 94, "experts": 128, "per_token": 8, "expert_ffn": 1536},
    ),
    # Queries, keys and values as expanded by latent attention; `replicated`: not divided over tensor-parallel ranks.
    "DeepSeek-V3-671B": CoreShape(
        **{"layers": 61, "hidden": 7168, "heads": 128, "query_width": 20480, "key_width": 20480, "ffn": 18432},
        **{"vocab": 129280, "tied": False, "attention": 128 * (1536 * 192 + 512 * 256 + 128 * 7168)},
        **{"replicated": 7168 * (1536 + 576) + 2 * 7168, "sparse": (False,) * 3 + (True,) * 58},
        **{"experts": 256, "per_token": 8, "expert_ffn": 2048, "shared_ffn": 2048},
    ),
}


@dataclass(frozen=True)
class Work:
    """The workload: one update."""

    length: int
    sequences: int
    capacity: float
    """Usable bytes of a GPU."""


@dataclass(frozen=True)
class Row:
    """One layout: peak memory of a rank in an update, and the bytes that it sends."""

    name: str
    micro: int
    parts: dict[str, float]
    sent: dict[str, float]
    bubble: float
    seconds: float

    @property
    def total(self) -> float:
        return PhaseMemory("update", "", {**self.parts, "context": CONTEXT}).total


def model_shape(core: CoreShape) -> ModelShape:
    root = 2 * core.vocab * core.hidden + core.hidden
    inner = core.per_token * core.expert_ffn + core.shared_ffn if core.experts else core.ffn
    head = core.query_width // core.heads
    sizes = {"hidden": core.hidden, "layers": core.layers, "heads": core.heads, "kv_heads": core.key_width // head}
    sizes |= {"head_dim": head, "intermediate": inner, "vocab": core.vocab}
    sizes |= {"layer_parameters": core.parameters - root, "root_parameters": root}
    largest = max(core.vocab * core.hidden, core.experts * 2 * core.hidden * core.expert_ffn)
    return ModelShape(**sizes, tied=False, largest_parameters=largest, head_norms=core.head_norms)


def active_parameters(core: CoreShape) -> int:
    """Return the number of parameters that process a token."""
    return replace(core, experts=core.per_token).parameters if core.experts else core.parameters


def fsdp_rows(core: CoreShape, world: int, work: Work) -> Iterator[Row]:
    shape = model_shape(core)
    model = FSDPModelMemory(shape, shards=world, compiled=True)
    for micro in (1, 2, 4):
        micro_batches = work.sequences / (micro * world)
        if micro_batches < 1:
            continue
        tokens = micro * work.length
        state = {"weights": model.weights(), "optimizer": model.moments()}
        parts = state | model.update(tokens, tokens, math.ceil(micro_batches))
        # Per micro-batch: the weights of each layer twice in the compute dtype, the gradients once in float32.
        sent = {"data": micro_batches * (2 * 2 + 4) * shape.parameters * (world - 1) / world}
        seconds = sent["data"] / (INSIDE if world <= NODE else BETWEEN)  # overlaps with compute
        compute = compute_seconds(core, world, work)
        yield Row("fsdp", micro, parts, sent, 0.0, max(compute, seconds) + 0.1 * min(compute, seconds))


def megatron_rows(core: CoreShape, world: int, work: Work) -> Iterator[Row]:
    experts = [2**power for power in range(9)] if core.experts else [1]
    heads = math.gcd(core.heads, core.key_width // (core.query_width // core.heads))
    for tp, pp, ep, micro in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), experts, (1, 2, 4)):
        etp = 1 if core.experts else tp
        if heads % tp or world % (tp * pp) or world % (ep * etp * pp) or (core.experts and core.experts % ep):
            continue
        even = core.layers % pp == 0
        split = None if even else split_evenly(core.layers, pp)
        if not even and split is None:
            continue
        first, last = split or (None, None)
        layout = MegatronLayout(world=world, tp=tp, pp=pp, ep=ep, etp=etp, first=first, last=last)
        micro_batches = work.sequences / (micro * layout.dp)
        if micro_batches < 1:
            continue
        model = MegatronModelMemory(shape=model_shape(core), core=core, layout=layout, recompute=FULL)
        tokens = micro * work.length
        state = {"weights": model.weights(), "optimizer": model.moments()}
        parts = state | model.update(tokens, tokens, math.ceil(micro_batches))
        sent = model.communication(work.sequences * work.length / layout.dp)
        bubble = layout.bubble(math.ceil(micro_batches))
        group_sizes = {"tensor": tp, "expert": ep * etp, "data": world, "pipeline": 2 * NODE, "context": 1}
        links = {kind: INSIDE if group_sizes[kind] <= NODE else BETWEEN for kind in sent}
        transfer_seconds = (
            sum(sent[kind] / links[kind] for kind in ("tensor", "expert", "pipeline")) + sent["data"] / links["data"]
        )
        seconds = (compute_seconds(core, world, work) + transfer_seconds) / (1 - bubble)
        yield Row(layout_name(layout), micro, parts, sent, bubble, seconds)


def layout_name(layout: MegatronLayout) -> str:
    named = {"TP": layout.tp, "PP": layout.pp, "EP": layout.ep, "DP": layout.dp}
    text = " × ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "DP 1"
    return text if layout.first is None else f"{text} (first {layout.first}, last {layout.last} layers)"


def compute_seconds(core: CoreShape, world: int, work: Work) -> float:
    """Forward, recomputed forward and backward pass: 8 FLOP per active parameter and token."""
    return 8 * active_parameters(core) * work.sequences * work.length / world / SPEED


def best(rows: Iterator[Row], capacity: float) -> Row | None:
    """Return the fastest layout that fits; if none does, the smallest."""
    candidates = list(rows)
    fitting = [row for row in candidates if row.total <= capacity]
    if fitting:
        return min(fitting, key=lambda row: row.seconds)
    return min(candidates, key=lambda row: row.total, default=None)


def table(core: CoreShape, work: Work) -> Iterator[str]:
    memory = ("weights", "gradients", "optimizer", "activations", "head")
    kinds = ("tensor", "expert", "pipeline", "data")
    yield f"| GPUs | layout | sequences a pass | {' | '.join(memory)} | total | {' | '.join(kinds)} | bubble |"
    yield "|---:|---|---:" + "|---:" * (len(memory) + len(kinds) + 2) + "|"
    for world in WORLDS:
        for rows in (fsdp_rows, megatron_rows):
            row = best(rows(core, world, work), work.capacity)
            if row is None:
                continue
            parts = row.parts | {"activations": row.parts["activations"] + row.parts["gathered"]}
            total = f"{row.total / GB:.1f}" if row.total <= work.capacity else f"**{row.total / GB:.0f}: no**"
            memory_cells = " | ".join(f"{parts[name] / GB:.1f}" for name in memory)
            sent = " | ".join(f"{row.sent.get(kind, 0.0) / 1e9:.0f}" for kind in kinds)
            yield f"| {world} | {row.name} | {row.micro} | {memory_cells} | {total} | {sent} | {row.bubble:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-gb", type=float, default=80, help="memory of one GPU")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=512, help="sequences of one optimizer step")
    options = parser.parse_args()
    work = Work(options.length, options.sequences, 0.9 * options.device_gb * GB)
    for name, core in MODELS.items():
        active = f", {active_parameters(core) / 1e9:.1f} of them for each token" if core.experts else ""
        print(f"\n### {name}: {core.parameters / 1e9:.1f} billion parameters{active}\n")
        print("\n".join(table(core, work)))


if __name__ == "__main__":
    main()
