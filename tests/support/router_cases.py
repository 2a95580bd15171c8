"""Mixtures whose experts are noted and told: batches of experts, and transformers alone doing as it is told."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss
from tests.support.tiny import tiny_model
from verl.models.routing import record_routes, routers
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching

UNKNOWN = 255
OUTPUTS = ["log_probs", "entropy"]
EXPERTS, CHOSEN, LAYERS = 8, 3, 3
_QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
# Weights that add up to 1 or not, layers without experts, an expert for all tokens.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_QWEN, "head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
}


def mixture(family: str) -> Any:
    """Whose routers do not give all experts the same weight, as they do when they are new."""
    model = tiny_model(family, num_hidden_layers=LAYERS, **FAMILIES[family])
    for router in routers(model).values():
        torch.nn.init.normal_(router.weight, std=0.5)
    return model


def told_experts(data: DataProto, layers: int, experts: int, chosen: int) -> torch.Tensor:
    """[B, P+R, layers, k] uint8, different ones for every token; of some tokens nothing is known."""
    draw = torch.Generator().manual_seed(3)
    shape = (*data.batch["attention_mask"].shape, layers, experts)
    told = torch.rand(shape, generator=draw).argsort(dim=-1)[..., :chosen].to(torch.uint8)
    told[torch.rand(shape[:2], generator=draw) < 0.2] = UNKNOWN
    return told


def own_experts(model: Any, data: DataProto, told: torch.Tensor) -> torch.Tensor:
    """[B, P+R, layers, k] as the routers of transformers choose, row by row; `UNKNOWN` elsewhere."""
    seen: dict[int, torch.Tensor] = {}
    record_routes(model, seen.__setitem__)
    table = torch.full_like(told, UNKNOWN)
    for place, ids, mask in zip(table, data.batch["input_ids"], data.batch["attention_mask"].bool(), strict=True):
        with torch.no_grad():
            model(input_ids=ids[mask][None])
        for layer, experts in seen.items():
            place[mask.nonzero()[:, 0], layer] = experts.to(torch.uint8)
    return table


def with_told(model: Any, data: DataProto, told: torch.Tensor) -> Any:
    """The model of transformers whose routers do as they are told, one row after the other."""
    masks = data.batch["attention_mask"].bool()
    for layer, router in routers(model).items():
        passes = count()

        def replay(module: Any, _: Any, chosen: Any, layer: int = layer, passes: Any = passes) -> Any:
            row = next(passes) % len(masks)
            logits, _, own = chosen
            wanted = told[row][masks[row]][:, layer].long()
            wanted = torch.where(wanted < logits.shape[-1], wanted, own)
            picked = logits.softmax(-1).gather(1, wanted)
            if getattr(module, "norm_topk_prob", True):
                picked = picked / picked.sum(-1, keepdim=True)
            return logits, picked, wanted

        router.register_forward_hook(replay)
    return model


def rows() -> DataProto:
    return make_batch(rows=5, vocab=260)


def replayed(family: str, micro: MicroBatching, **changes: Any) -> dict[str, Any]:
    """What an FSDP engine of one or more ranks notes, finds where it is told, and learns."""
    engine = make_engine(mixture(family), router_replay=True, enable_gradient_checkpointing=True, **changes)
    data = rows()
    noted = engine.infer(data, [*OUTPUTS, "routed_experts"], 0.7, micro).batch
    data.batch["routed_experts"] = told_experts(data, LAYERS, EXPERTS, CHOSEN)
    told = engine.infer(data, [*OUTPUTS, "routed_experts"], 0.7, micro).batch
    metrics = engine.forward_backward(data, token_loss, OUTPUTS, 0.7, micro)
    gradients = {name: value.clone() for name, value in engine_gradients(engine).items()}
    return {"noted": dict(noted.items()), "told": dict(told.items()), "metrics": metrics, "gradients": gradients}


def sharing_ranks_replay(rank: int, ranks: int, folder: str) -> None:
    found = replayed("qwen3_moe", MicroBatching(size=2), sequence_parallel_size=ranks)
    torch.save(found, Path(folder) / f"replay-{rank}.pt")
