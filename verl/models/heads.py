"""What stands on top of the hidden states: the vocabulary head as each model family has it, and the value head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class ValueModel(nn.Module):
    """A bare transformer with a linear map to one number per token, under the names of a token classifier.

    The head starts at 0 (every state is worth nothing yet) unless `head` gives `score.weight` and `score.bias`.
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
                    f"model.path: {name} of the checkpoint has shape {tuple(value.shape)}, a value head needs "
                    f"{tuple(parameter.shape)}. Give a model with one label, or one without a head."
                )
            parameter.data.copy_(value)

    @property
    def base_model(self) -> Any:
        return getattr(self, self.base_model_prefix)


def head_weights(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [vocab, H] and bias [vocab] of the linear map from hidden states to logits, as they are now."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"model.path: the output layer is a {type(linear).__name__}; log-probabilities are computed from a plain "
            "linear one. Leave it out of model.target_modules (model.exclude_modules), or use another model."
        )
    return linear.weight, linear.bias


def wide_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """left @ right, multiplied in their dtype and written in at least float32."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide) if out is None else torch.mm(left, right, wide, out=out)
    return torch.mm(left.to(wide), right.to(wide), out=out)


def logit_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden [N, H] -> float32 logits [N, vocab], exactly as the causal LM `model` computes them."""
    weight, bias = head_weights(model)
    adjusted = logit_adjustment(model.config)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = nn.functional.linear(hidden, weight, bias).float()
        return values if adjusted is None else adjusted(values)

    return logits


@dataclass(frozen=True)
class LogitAdjustment:
    """What some models do to their float32 logits after the linear map: scale them, then hold them below a cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            values = values * self.scale
        return values if self.softcap is None else torch.tanh(values / self.softcap) * self.softcap


def logit_adjustment(config: Any) -> LogitAdjustment | None:
    """What a model of this config does to its logits; None: nothing."""
    config = config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return None if softcap is None and scale == 1.0 else LogitAdjustment(scale, softcap)
