"""Worker functions of the tests of MegatronEngine on four ranks (imported by name in the rank processes)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.engine_cases import OUTPUTS_OF_KIND as KINDS
from tests.support.engine_cases import (
    fields_by_batching,
    make_batch,
    make_engine,
    model_of_kind,
    token_loss,
)
from tests.support.megatron_cases import make_megatron
from tests.support.router_cases import random_experts
from verl.models.loading import empty_model
from verl.workers.engine.base import MicroBatching

RANKS = 4
ROWS = 7
FIXED, DYNAMIC = MicroBatching(size=2), MicroBatching(max_tokens=21)
STEPS = 3
T, P, V, C = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
E, ET = "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP4": {},
    "DP4, whole optimizer": {"use_distributed_optimizer": False},
    "TP2": {T: 2},
    "TP4": {T: 4},
    "TP2, whole sequences": {T: 2, "sequence_parallel": False},
    "PP2": {P: 2},
    "PP4": {P: 4},
    "VPP2": {P: 2, V: 2},
    "TP2 PP2": {T: 2, P: 2},
    "CP2": {C: 2},
    "TP2 CP2": {T: 2, C: 2},
    "EP2": {E: 2},
    "EP4": {E: 4},
    "TP2 EP2": {T: 2, E: 2, ET: 1},
    "TP2 EP2 ETP2": {T: 2, E: 2, ET: 2},
    "PP2 EP2": {P: 2, E: 2},
    "CP2 EP2": {C: 2, E: 2},
}
WEIGHTS_ONLY = "TP2 EP2 ETP2"  # its forward pass gathers shards of unequal length, which gloo does not support
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
EXPERTS_SHAPE = (4, EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"])
# Kind, family and changes: heads tied or not, biases, norms of queries, fewer KV heads than four tensor-parallel ranks.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("causal_lm", "qwen2", {}),
    "tied": ("causal_lm", "qwen2", {"tie_word_embeddings": True, "vocab_size": 261}),
    "qwen3": ("causal_lm", "qwen3", {"head_dim": 32}),
    "window": ("causal_lm", "mistral", {"sliding_window": 5, "num_key_value_heads": 4}),
    "experts": ("causal_lm", "qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "unnormalized": ("causal_lm", "qwen3_moe", {**EXPERTS, "norm_topk_prob": False}),
    "shared": ("causal_lm", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": True}),
    "mixtral": ("causal_lm", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "value": ("value", "llama", {}),
    "scores": ("sequence_classification", "qwen2", {}),
}


def model_of(name: str) -> Any:
    kind, family, changes = MODELS[name]
    return model_of_kind(kind, family, **{"num_hidden_layers": 4, **changes})


def rows() -> Any:
    return make_batch(rows=ROWS, vocab=260)


def rows_of_dp_rank(dp_rank: int, dp_size: int) -> slice:
    """Rows of a data-parallel rank; ranks have different numbers of rows and micro-batches."""
    bounds = {1: [0, ROWS], 2: [0, 5, ROWS], 4: [0, 3, 4, 6, ROWS]}[dp_size]
    return slice(bounds[dp_rank], bounds[dp_rank + 1])


def train_cases(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """All results that the tests check, computed in one process start; rank r writes `results-r.pt`."""
    results = {}
    for layout, model in cases:
        results[layout, model] = train_case(model, LAYOUTS[layout])
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def train_case(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Outputs of an engine before training, its gradients, and its weights after some steps."""
    kind, _, _ = MODELS[name]
    outputs, train = KINDS[kind], kind != "sequence_classification"
    engine = make_megatron(model_of(name), kind, train=train, lr=1e-3, **changes)
    data = rows()[rows_of_dp_rank(engine.dp_rank, engine.dp_size)]
    results: dict[str, Any] = {"place": (engine.dp_rank, engine.dp_size, engine.collects)}
    results |= fields_by_batching(engine, data, {"fixed": FIXED, "dynamic": DYNAMIC})
    if not train:
        return results
    results["metrics"] = engine.forward_backward(data, token_loss, outputs, 0.7, FIXED)
    results["gradients"] = gather_full(engine, gradients=True)
    engine = make_megatron(model_of(name), kind, lr=1e-3, **changes)
    steps = []
    for _ in range(STEPS):
        loss = engine.forward_backward(data, token_loss, outputs, 0.7, DYNAMIC)
        steps.append((loss.get("loss", (0.0, 0.0))[0], engine.optimizer_step()["grad_norm"]))
    results["steps"] = steps
    results["weights"] = gather_full(engine, gradients=False)
    results["sound"] = engine.weights_finite(thorough=True)
    return results


def train_colocated_engines(rank: int, ranks: int, folder: str) -> None:
    """Train an actor, a critic of another layout and a critic on FSDP, and run a reference, in the same processes."""
    engines = {
        "actor": make_megatron(model_of("qwen2"), lr=1e-3, **LAYOUTS["TP2 PP2"]),
        "critic": make_megatron(model_of("value"), "value", lr=1e-3, **LAYOUTS["TP2"]),
        "fsdp critic": make_engine(model_of("value"), "value", lr=1e-3),
    }
    reference = make_megatron(model_of("qwen2"), train=False, **LAYOUTS["VPP2"])
    parts = {name: rows()[rows_of_dp_rank(engine.dp_rank, engine.dp_size)] for name, engine in engines.items()}
    results: dict[str, Any] = {name: [] for name in engines} | {"reference": []}
    for _ in range(STEPS):
        losses = {
            name: engine.forward_backward(parts[name], token_loss, KINDS[engine.kind], 0.7, DYNAMIC)
            for name, engine in engines.items()
        }
        data = rows()[rows_of_dp_rank(reference.dp_rank, reference.dp_size)]
        fields = reference.infer(data, ["log_probs"], 0.7, FIXED)
        results["reference"].append(fields.batch["log_probs"] if reference.collects else None)
        for name, engine in engines.items():
            loss = losses[name].get("loss", (0.0,))[0] if engine.collects else 0.0
            results[name].append((loss, engine.optimizer_step()["grad_norm"]))
    results["place"] = reference.dp_rank, reference.dp_size
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def gather_full(engine: Any, gradients: bool) -> dict[str, torch.Tensor]:
    """Unsharded weights or gradients by Hugging Face name. After gathering gradients no optimizer step is possible."""
    from megatron.core.distributed import finalize_model_grads

    from verl.models.megatron_core import shard_slices, weight_map
    from verl.workers.engine.megatron.model import global_names

    layout, table = engine.layout, {weight.name: weight for weight in weight_map(engine.arch, engine.kind)}
    with layout.activate():
        if gradients:
            finalize_model_grads(engine.chunks, force_all_reduce=True)
        pieces = []
        for chunk in engine.models:
            parameters = dict(chunk.named_parameters())
            for local, name in global_names(chunk, layout).items():
                value = parameters[local].main_grad if gradients else parameters[local].detach()
                weight = table[name]
                part = layout.tp if weight.expert is None else layout.etp
                for piece in shard_slices(weight, engine.arch, part.rank, part.size):
                    pieces.append((piece.hf, piece.source, value[piece.place].clone()))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    shapes = {
        name: value.shape
        for name, value in empty_model(engine.hf_config, engine.kind, torch.float32).state_dict().items()
    }
    results: dict[str, torch.Tensor] = {}
    for hf, source, value in itertools.chain(*gathered):
        results.setdefault(hf, torch.full(shapes[hf], torch.nan))[source] = value
    return results


def replay_cases(rank: int, ranks: int, folder: str, layouts: list[str]) -> None:
    """Record the experts of a pass, then replay others; rank r writes `replay-r.pt`."""
    results = {}
    for layout in layouts:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        engine = make_megatron(
            model_of("experts"), router_replay=True, override_transformer_config=recompute, **LAYOUTS[layout]
        )
        row_slice = rows_of_dp_rank(engine.dp_rank, engine.dp_size)
        data, outputs = rows()[row_slice], ["log_probs", "entropy"]
        recorded = engine.infer(data, [*outputs, "routed_experts"], 0.7, FIXED).batch
        data.batch["routed_experts"] = random_experts(rows(), *EXPERTS_SHAPE)[row_slice]
        replayed = engine.infer(data, [*outputs, "routed_experts"], 0.7, FIXED).batch
        metrics = engine.forward_backward(data, token_loss, outputs, 0.7, FIXED)
        results[layout] = {
            "place": (engine.dp_rank, engine.dp_size, engine.collects),
            "recorded": dict(recorded.items()) if recorded is not None else {},
            "replayed": dict(replayed.items()) if replayed is not None else {},
            "metrics": metrics,
            "gradients": gather_full(engine, gradients=True),
        }
    torch.save(results, Path(folder) / f"replay-{rank}.pt")
