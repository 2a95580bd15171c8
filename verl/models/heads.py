"""Output heads: the vocabulary head with the logit adjustments of each model family, and the value head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class ValueModel(nn.Module):
    """A transformer with a linear head of one value per token, with the parameter names of a token classifier.

    The head is initialized with 0, or with `score.weight` and `score.bias` of `head`.
    """

    def __init__(self, base: Any, head: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.config = base.config
        self.base_model_prefix = base.base_model_prefix or "model"
        setattr(self, self.base_model_prefix, base)
        self.score = nn.Linear(base.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)
        for name, value in (head or {}).items():
            parameter = self.get_parameter(name)
            if parameter.shape != value.shape:
                raise ValueError(
                    f"model.path: {name} of the checkpoint has shape {tuple(value.shape)}, but a value head needs "
                    f"{tuple(parameter.shape)}. Use a model with one label, or one without a head."
                )
            parameter.data.copy_(value)

    @property
    def base_model(self) -> Any:
        return getattr(self, self.base_model_prefix)


def head_weights(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight [vocab, H] and bias [vocab] or None of the linear output layer."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"model.path: the output layer is a {type(linear).__name__}, but log-probs need an nn.Linear. Remove it "
            "from model.target_modules (model.exclude_modules), or use another model."
        )
    return linear.weight, linear.bias


def wide_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return left @ right, multiplied in their dtype, with at least float32 results."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide) if out is None else torch.mm(left, right, wide, out=out)
    return torch.mm(left.to(wide), right.to(wide), out=out)


def logit_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states [N, H] to float32 logits [N, vocab] of the causal LM `model`."""
    weight, bias = head_weights(model)
    adjusted = logit_adjustment(model.config)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = nn.functional.linear(hidden, weight, bias).float()
        return values if adjusted is None else adjusted(values)

    return logits


@dataclass(frozen=True)
class LogitAdjustment:
    """Adjustment of float32 logits after the output layer of some models: a scale, then a soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            values = values * self.scale
        return values if self.softcap is None else torch.tanh(values / self.softcap) * self.softcap


def logit_adjustment(config: Any) -> LogitAdjustment | None:
    """Return the logit adjustment of a model with this config; None if it has none."""
    config = config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return None if softcap is None and scale == 1.0 else LogitAdjustment(scale, softcap)
