"""What four ranks do in the Megatron engine's tests; the processes import it by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.engine_cases import OUTPUTS_OF_KIND as KINDS
from tests.support.engine_cases import (
    fields_by_cut,
    make_batch,
    make_engine,
    model_of_kind,
    token_loss,
)
from tests.support.megatron_cases import make_megatron
from tests.support.router_cases import told_experts
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
WEIGHTS_ONLY = "TP2 EP2 ETP2"  # its passes gather parts of unequal length, which gloo does not
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
TOLD = (4, EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"])
# Kind, family and changes: heads tied or not, biases, norms of queries, fewer key heads than four tensor ranks.
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


def mine(dp_rank: int, dp_size: int) -> slice:
    """Not as many rows for every part, and not as many micro-batches."""
    bounds = {1: [0, ROWS], 2: [0, 5, ROWS], 4: [0, 3, 4, 6, ROWS]}[dp_size]
    return slice(bounds[dp_rank], bounds[dp_rank + 1])


def ranks_at_work(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Everything that the tests look at, in one start of the processes; rank r writes `found-r.pt`."""
    found = {}
    for layout, model in cases:
        found[layout, model] = trained(model, LAYOUTS[layout])
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def trained(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What an engine of this layout finds before it learns, its gradients, and its weights after some steps."""
    kind, _, _ = MODELS[name]
    outputs, train = KINDS[kind], kind != "sequence_classification"
    engine = make_megatron(model_of(name), kind, train=train, lr=1e-3, **changes)
    data = rows()[mine(engine.dp_rank, engine.dp_size)]
    found: dict[str, Any] = {"place": (engine.dp_rank, engine.dp_size, engine.collects)}
    found |= fields_by_cut(engine, data, {"fixed": FIXED, "dynamic": DYNAMIC})
    if not train:
        return found
    found["metrics"] = engine.forward_backward(data, token_loss, outputs, 0.7, FIXED)
    found["gradients"] = whole(engine, gradients=True)
    engine = make_megatron(model_of(name), kind, lr=1e-3, **changes)
    steps = []
    for _ in range(STEPS):
        loss = engine.forward_backward(data, token_loss, outputs, 0.7, DYNAMIC)
        steps.append((loss.get("loss", (0.0, 0.0))[0], engine.optimizer_step()["grad_norm"]))
    found["steps"] = steps
    found["weights"] = whole(engine, gradients=False)
    found["sound"] = engine.weights_finite(thorough=True)
    return found


def neighbours_at_work(rank: int, ranks: int, folder: str) -> None:
    """An actor, a critic of another layout, a critic on FSDP and a reference in the same processes, taking turns."""
    engines = {
        "actor": make_megatron(model_of("qwen2"), lr=1e-3, **LAYOUTS["TP2 PP2"]),
        "critic": make_megatron(model_of("value"), "value", lr=1e-3, **LAYOUTS["TP2"]),
        "fsdp critic": make_engine(model_of("value"), "value", lr=1e-3),
    }
    reference = make_megatron(model_of("qwen2"), train=False, **LAYOUTS["VPP2"])
    parts = {name: rows()[mine(engine.dp_rank, engine.dp_size)] for name, engine in engines.items()}
    found: dict[str, Any] = {name: [] for name in engines} | {"reference": []}
    for _ in range(STEPS):
        losses = {
            name: engine.forward_backward(parts[name], token_loss, KINDS[engine.kind], 0.7, DYNAMIC)
            for name, engine in engines.items()
        }
        data = rows()[mine(reference.dp_rank, reference.dp_size)]
        fields = reference.infer(data, ["log_probs"], 0.7, FIXED)
        found["reference"].append(fields.batch["log_probs"] if reference.collects else None)
        for name, engine in engines.items():
            own = losses[name].get("loss", (0.0,))[0] if engine.collects else 0.0
            found[name].append((own, engine.optimizer_step()["grad_norm"]))
    found["place"] = reference.dp_rank, reference.dp_size
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def whole(engine: Any, gradients: bool) -> dict[str, torch.Tensor]:
    """Weights or gradients by Hugging Face name, put together from all ranks' parts. After gradients, no step."""
    from megatron.core.distributed import finalize_model_grads

    from verl.models.megatron_core import shard_slices, weight_map
    from verl.workers.engine.megatron.model import global_names

    layout, table = engine.layout, {weight.name: weight for weight in weight_map(engine.arch, engine.kind)}
    with layout.active():
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
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    shapes = {
        name: value.shape
        for name, value in empty_model(engine.hf_config, engine.kind, torch.float32).state_dict().items()
    }
    found: dict[str, torch.Tensor] = {}
    for hf, source, value in itertools.chain(*everyone):
        found.setdefault(hf, torch.full(shapes[hf], torch.nan))[source] = value
    return found


def ranks_that_replay(rank: int, ranks: int, folder: str, layouts: list[str]) -> None:
    """Experts are noted, then others are told: `replay-r.pt`."""
    found = {}
    for layout in layouts:
        again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        engine = make_megatron(
            model_of("experts"), router_replay=True, override_transformer_config=again, **LAYOUTS[layout]
        )
        place = mine(engine.dp_rank, engine.dp_size)
        data, outputs = rows()[place], ["log_probs", "entropy"]
        noted = engine.infer(data, [*outputs, "routed_experts"], 0.7, FIXED).batch
        data.batch["routed_experts"] = told_experts(rows(), *TOLD)[place]
        told = engine.infer(data, [*outputs, "routed_experts"], 0.7, FIXED).batch
        metrics = engine.forward_backward(data, token_loss, outputs, 0.7, FIXED)
        found[layout] = {
            "place": (engine.dp_rank, engine.dp_size, engine.collects),
            "noted": dict(noted.items()) if noted is not None else {},
            "told": dict(told.items()) if told is not None else {},
            "metrics": metrics,
            "gradients": whole(engine, gradients=True),
        }
    torch.save(found, Path(folder) / f"replay-{rank}.pt")
