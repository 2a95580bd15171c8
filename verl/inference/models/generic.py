"""GenericModel: any causal LM that attends through transformers' attention interface, run by its own module.

Our paged attention is registered there under a name of its own. Whether a model really works that way is tried out
when it is built (see `trial`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from verl.inference.attention.base import AttentionStep
from verl.inference.memory import Region
from verl.inference.models.trial import StepLostError, Trial
from verl.inference.weights import Shard, pack_module
from verl.models.attention import layers_objection
from verl.models.heads import logit_adjustment, wide_product

__all__ = ["GenericModel"]

_ATTENTION = "verl_paged"
# Rotary embeddings that turn to other angles for everyone once one sequence of a batch is long.
_BATCH_DEPENDENT_ROTARY = ("dynamic", "longrope")


class GenericModel:
    """An InferenceModel over a Hugging Face module, which it takes over: weights move into one region of `device`."""

    def __init__(
        self, hf: Any, max_length: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        config = hf.config.get_text_config(decoder=True)
        _refuse(hf, _unsupported_reason(hf, config, max_length))
        self.device, self.dtype = torch.device(device), dtype
        self.region: Region = pack_module(hf, self.device, dtype)
        self._hf = hf.eval().requires_grad_(False)
        self._linear = hf.get_output_embeddings()
        self._adjusted = logit_adjustment(config)
        self.vocab_size = len(self._linear.weight)
        self.num_layers = config.num_hidden_layers
        trial = Trial(hf, self.device)
        AttentionInterface.register(_ATTENTION, _paged_attention)
        hf.set_attn_implementation(_ATTENTION)
        _refuse(hf, trial.difference(self, config))
        self.num_heads, self.num_kv_heads, self.head_dim = trial.attention_shape

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        output = self._hf.base_model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attention_step=step
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        values = wide_product(hidden, self._linear.weight.t())
        if self._linear.bias is not None:
            values += self._linear.bias
        return values if self._adjusted is None else self._adjusted(values)

    def shards(self) -> dict[str, Shard]:
        return {}

    def named_weights(self) -> dict[str, torch.Tensor]:
        return self._hf.state_dict()


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_step: AttentionStep | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: query [1, heads, T, dim] → [1, T, heads, dim]."""
    if attention_step is None:
        raise StepLostError
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_step.backend(module.layer_idx, query, key, value, attention_step, scale, sliding_window, softcap)
    return out.unsqueeze(0), None


def _unsupported_reason(hf: Any, config: Any, max_length: int) -> str | None:
    """What its class and config say against it."""
    if getattr(hf, "_is_stateful", False):
        return "its state is no KV cache"
    if hf.config.is_encoder_decoder:
        return "it has an encoder"
    objection = layers_objection(hf, config)
    if objection is not None:
        return objection
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        kind = settings.get("rope_type")
        limit = settings.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in _BATCH_DEPENDENT_ROTARY and max_length > limit:
            return (
                f"beyond {limit} tokens its {kind} rotary embedding depends on who else is in the batch"
                f" (max_model_len is {max_length})"
            )
    return None


def _refuse(hf: Any, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"name: the native engine cannot run {type(hf).__name__}: {reason}. Set name=hf.")
