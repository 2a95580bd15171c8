"""Random LoRA adapters, by peft, on tiny models: the reference for the inference engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import tiny_model


def peft_model(
    family: str,
    seed: int,
    rank: int = 4,
    alpha: float = 6.0,
    targets: Any = "all-linear",
    use_rslora: bool = False,
    layers: list[int] | None = None,
    **changes: Any,
) -> Any:
    """The tiny model of a family, the same for every seed, with an adapter that depends on the seed. `layers`: decoder
    layers with adapters (None: all)."""
    from peft import LoraConfig, get_peft_model

    fan_in_fan_out = family == "gpt2"
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        use_rslora=use_rslora,
        layers_to_transform=layers,
        fan_in_fan_out=fan_in_fan_out,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(tiny_model(family, **changes), config)
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return model.eval()


def save_adapter(folder: Path, model: Any) -> str:
    """Write the adapter of `peft_model` as peft does."""
    model.save_pretrained(str(folder))
    return str(folder)


def engine_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The adapter of `peft_model` under the engine's parameter names; the LoRA scale is multiplied into `lora_B`."""
    settings = model.peft_config["default"]
    scale = settings.lora_alpha / (settings.r**0.5 if settings.use_rslora else settings.r)
    tensors = {}
    for name, value in model.named_parameters():
        if "lora_" in name:
            parameter_name = name.removeprefix("base_model.model.").replace(".default.", ".")
            tensors[parameter_name] = value.detach() * (scale if "lora_B" in parameter_name else 1.0)
    return tensors
