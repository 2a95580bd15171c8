"""What stands on top of the hidden states: the vocabulary head taken in chunks, and the value head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

# Elements of the logits of one chunk (256 MB in float32): all the memory that the vocabulary ever takes.
_CHUNK_ELEMENTS = 2**26


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


def logit_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden [N, H] -> float32 logits [N, vocab], exactly as the causal LM `model` computes them."""
    linear = model.get_output_embeddings()
    adjusted = logit_adjustment(model.config)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = linear(hidden).float()
        return values if adjusted is None else adjusted(values)

    return logits


def logit_adjustment(config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a model of this config does to its float32 logits after the linear map; None: nothing."""
    config = config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    if softcap is None and scale == 1.0:
        return None

    def adjusted(values: torch.Tensor) -> torch.Tensor:
        if scale != 1.0:
            values = values * scale
        return values if softcap is None else torch.tanh(values / softcap) * softcap

    return adjusted


def label_statistics(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    with_entropy: bool,
    chunk_rows: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of `labels` [N] (and entropy) at `hidden` [N, H], float32 [N].

    Logits exist for `chunk_rows` rows at a time, in the forward pass and, computed again, in the backward pass.
    """

    def chunk(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = logits_of(rows)
        if temperature != 1.0:
            logits = logits / temperature
        log_probs = logprobs_from_logits(logits, targets)
        return (log_probs, entropy_from_logits(logits)) if with_entropy else (log_probs,)

    parts = []
    for rows, targets in zip(hidden.split(chunk_rows), labels.split(chunk_rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, rows, targets, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(rows, targets))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return columns[0], columns[1] if with_entropy else None


def chunk_rows_for(vocab_size: int) -> int:
    """How many rows of logits to hold at once."""
    return max(1, _CHUNK_ELEMENTS // vocab_size)
