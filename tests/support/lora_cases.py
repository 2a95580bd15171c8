"""LoRA by peft on transformers models, as the reference for engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.support.engine_cases import engine_gradients, make_engine, plain_fields, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.protocol import DataProto
from verl.workers.engine.base import Counts

RANK, ALPHA = 4, 16


def lora_engine(model: Any, kind: str = "causal_lm", **changes: Any) -> Any:
    return make_engine(model, kind, lora_rank=RANK, lora_alpha=ALPHA, **changes)


def adapter_values(engine: Any) -> dict[str, torch.Tensor]:
    """Unsharded copies of the trained parameters, by name."""
    named = engine.model.hf.named_parameters()
    return {name: value.detach().full_tensor().cpu().clone() for name, value in named if value.requires_grad}


def perturb_lora_b(engine: Any) -> None:
    """Move every adapter matrix B away from 0, so that A has a gradient; the same for any number of ranks."""
    for name, value in engine.model.hf.named_parameters():
        if "lora_B" in name:
            local = value.detach().to_local()
            local.fill_(0.01 + len(name) % 7 / 500)


def peft_model(values: dict[str, torch.Tensor], family: str = "qwen2", **changes: Any) -> Any:
    """A tiny model wrapped by peft itself, with these adapters."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", fan_in_fan_out=family == "gpt2")
    model = get_peft_model(tiny_model(family, **changes), config)
    missing = model.load_state_dict({f"base_model.model.{name}": value for name, value in values.items()}, strict=False)
    assert not missing.unexpected_keys
    return model


def peft_gradients(
    values: dict[str, torch.Tensor], data: DataProto, temperature: float, family: str = "qwen2", **changes: Any
) -> dict[str, torch.Tensor]:
    """Gradients of `token_loss` over all of `data`, by peft and transformers alone, under the engine's names."""
    model, mask = peft_model(values, family, **changes), data.batch["response_mask"]
    counts = Counts(float(mask.sum()), float(mask.any(1).sum()))
    token_loss(plain_fields(model, data, temperature), data, counts)[0].backward()
    return {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def train_steps(engine: Any, data: DataProto, count: int, outputs: tuple[str, ...] = ("log_probs",)) -> None:
    for _ in range(count):
        engine.forward_backward(data, token_loss, outputs)
        engine.optimizer_step()


def lora_results(rank_rows: DataProto, folder: Path) -> dict[str, Any]:
    """Results of this rank for its rows `rank_rows`, to be compared with one rank and with peft."""
    results: dict[str, Any] = {}
    engine = lora_engine(str(folder / "model"))
    results["started"] = adapter_values(engine)
    perturb_lora_b(engine)
    engine.forward_backward(rank_rows, token_loss, ("log_probs", "entropy"), 0.7)
    results["gradients"] = engine_gradients(engine)

    engine = lora_engine(str(folder / "model"))
    engine.load(folder / "lora-one")
    train_steps(engine, rank_rows, 2)
    results["continued"] = whole_weights(engine)
    results["trained"] = engine.infer(rank_rows, ["log_probs"]).batch["log_probs"]
    with engine.base_weights():
        results["reference"] = engine.infer(rank_rows, ["log_probs"]).batch["log_probs"]
    engine.save(folder / "lora-two")
    engine.export_hf(folder / "lora-merged")
    # Frozen weights in bfloat16 and adapters in float32 are gathered together.
    engine = lora_engine(str(folder / "model"), mixed_precision="bf16")
    train_steps(engine, rank_rows, 1)
    results["mixed"] = engine.infer(rank_rows, ["log_probs"]).batch["log_probs"]
    return results
