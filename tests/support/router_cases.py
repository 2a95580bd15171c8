"""MoE models whose routing is recorded or replayed, and the same routing in transformers alone as the reference."""

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
# Router weights normalized or not, dense layers between MoE layers, a shared expert.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_QWEN, "head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
}


def moe_model(family: str) -> Any:
    """A tiny MoE model; its routers are re-initialized because default weights prefer no expert."""
    model = tiny_model(family, num_hidden_layers=LAYERS, **FAMILIES[family])
    for router in routers(model).values():
        torch.nn.init.normal_(router.weight, std=0.5)
    return model


def random_experts(data: DataProto, layers: int, experts: int, chosen: int) -> torch.Tensor:
    """[B, P+R, layers, k] uint8: random experts for every token; `UNKNOWN` for a fifth of the tokens."""
    generator = torch.Generator().manual_seed(3)
    shape = (*data.batch["attention_mask"].shape, layers, experts)
    experts_of_tokens = torch.rand(shape, generator=generator).argsort(dim=-1)[..., :chosen].to(torch.uint8)
    experts_of_tokens[torch.rand(shape[:2], generator=generator) < 0.2] = UNKNOWN
    return experts_of_tokens


def hf_experts(model: Any, data: DataProto, template: torch.Tensor) -> torch.Tensor:
    """[B, P+R, layers, k] experts that transformers' routers choose, `UNKNOWN` elsewhere; shaped like `template`."""
    experts_by_layer: dict[int, torch.Tensor] = {}
    record_routes(model, experts_by_layer.__setitem__)
    table = torch.full_like(template, UNKNOWN)
    for row, ids, mask in zip(table, data.batch["input_ids"], data.batch["attention_mask"].bool(), strict=True):
        with torch.no_grad():
            model(input_ids=ids[mask][None])
        for layer, experts in experts_by_layer.items():
            row[mask.nonzero()[:, 0], layer] = experts.to(torch.uint8)
    return table


def with_replayed_experts(model: Any, data: DataProto, experts: torch.Tensor) -> Any:
    """The transformers model with routers that replay these experts; it must be called row by row."""
    masks = data.batch["attention_mask"].bool()
    for layer, router in routers(model).items():
        passes = count()

        def replay(module: Any, _: Any, chosen: Any, layer: int = layer, passes: Any = passes) -> Any:
            row = next(passes) % len(masks)
            logits, _, recorded_experts = chosen
            replayed = experts[row][masks[row]][:, layer].long()
            replayed = torch.where(replayed < logits.shape[-1], replayed, recorded_experts)
            replayed_weights = logits.softmax(-1).gather(1, replayed)
            if getattr(module, "norm_topk_prob", True):
                replayed_weights = replayed_weights / replayed_weights.sum(-1, keepdim=True)
            return logits, replayed_weights, replayed

        router.register_forward_hook(replay)
    return model


def rows() -> DataProto:
    return make_batch(rows=5, vocab=260)


def replay_results(family: str, micro: MicroBatching, **changes: Any) -> dict[str, Any]:
    """Outputs of an FSDP engine while it records and while it replays experts, and its gradients."""
    engine = make_engine(moe_model(family), router_replay=True, enable_gradient_checkpointing=True, **changes)
    data = rows()
    recorded = engine.infer(data, [*OUTPUTS, "routed_experts"], 0.7, micro).batch
    data.batch["routed_experts"] = random_experts(data, LAYERS, EXPERTS, CHOSEN)
    replayed = engine.infer(data, [*OUTPUTS, "routed_experts"], 0.7, micro).batch
    metrics = engine.forward_backward(data, token_loss, OUTPUTS, 0.7, micro)
    gradients = {name: value.clone() for name, value in engine_gradients(engine).items()}
    return {
        "recorded": dict(recorded.items()),
        "replayed": dict(replayed.items()),
        "metrics": metrics,
        "gradients": gradients,
    }


def replay_with_sequence_parallel(rank: int, ranks: int, folder: str) -> None:
    results = replay_results("qwen3_moe", MicroBatching(size=2), sequence_parallel_size=ranks)
    torch.save(results, Path(folder) / f"replay-{rank}.pt")
