"""Trials instead of trust: does our head give a model's own logits, and may two of its texts share a packed row?"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from verl.models.attention import attend_packed, layers_objection, packed_attention, window_lost
from verl.models.forward import ResponseModel, front_rows
from verl.models.packing import Packing, packed_rows

logger = logging.getLogger(__name__)

_TRIAL = "verl_packed_trial"
# Half precision alone makes a part of this.
_LARGEST_GAP = 0.02


def check_head(model: ResponseModel, device: torch.device) -> None:
    """Refuse a causal LM whose logits are not what our head gives for a few tokens; other kinds have none of ours.

    A pass of the model, so a collective where it is sharded; needs no_grad and eval mode.
    """
    if model.kind != "causal_lm":
        return
    probe = torch.arange(1, 9)[None] % model.hf.config.get_text_config().vocab_size
    front = front_rows(probe, torch.ones_like(probe), response_length=1).to(device)
    gap = float(model(front, ("head_gap",), (1, 1))["head_gap"])
    if gap > _LARGEST_GAP:
        raise ValueError(
            f"model.path: {type(model.hf).__name__} changes its logits after the output layer in a way that is not "
            f"known here (they differ by {gap:.1%}). Use another model, or add it to verl.models.heads."
        )


def runs_packed(model: ResponseModel, device: torch.device) -> bool:
    """Switch `model` to packed attention if it can: from then on it takes PackedRows, else it stays as it is and the
    log says why. A pass of the model, so a collective where it is sharded; needs no_grad and eval mode.
    """
    hf = model.hf if hasattr(model.hf, "set_attn_implementation") else model.hf.base_model
    reason = _unsupported(model, hf) or _difference(model, hf, device)
    if reason is None:
        attend_packed(hf)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("use_remove_padding: %s runs with padding: %s", type(hf).__name__, reason)
    return reason is None


class _Noting(Packing):
    """Notes every layer that it is handed to."""

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing.cu_seqlens, packing.lengths, packing.max_length)
        self.windows: list[int | None] = []
        self.bidirectional: list[str] = []


def _unsupported(model: ResponseModel, hf: Any) -> str | None:
    """What its class and config say against it."""
    if hf.config.is_encoder_decoder or (model.kind == "sequence_classification" and not hasattr(hf, "score")):
        return "it has an encoder"
    if getattr(hf, "_is_stateful", False):
        return "its layers carry a state along the row"
    return layers_objection(hf, hf.config.get_text_config())


def _difference(model: ResponseModel, hf: Any, device: torch.device) -> str | None:
    """What keeps the model from running packed, in words; None if nothing does."""
    from transformers import AttentionInterface

    config = hf.config.get_text_config()
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    ids = (torch.arange(1, 15) % config.vocab_size).view_as(mask)
    apart = model(front_rows(ids, mask).to(device), ("hidden",), (2, 0))["hidden"]
    own = hf.config._attn_implementation
    AttentionInterface.register(_TRIAL, _trial_attention)
    hf.set_attn_implementation(_TRIAL)
    rows = packed_rows(ids, mask).to(device)
    noting = _Noting(rows.packing)
    packed = model(replace(rows, packing=noting), ("hidden",), (2, 0))["hidden"]
    hf.set_attn_implementation(own)
    if not noting.windows:
        return "its layers do not hand arguments on to the attention interface"
    if noting.bidirectional:
        return f"{noting.bidirectional[0]} looks at later tokens"
    if len(noting.windows) != config.num_hidden_layers:
        return f"{len(noting.windows)} of its {config.num_hidden_layers} layers attend through the attention interface"
    lost = window_lost(config, noting.windows)
    if lost is not None:
        return lost
    apart = apart.float()[mask.flatten().nonzero()[:, 0].to(device)]
    gap = float((packed.float() - apart).abs().max() / apart.abs().max())
    # Weights that are not finite say nothing about the architecture.
    limit = 1e-3 if packed.dtype == torch.float32 else 0.05
    return f"its hidden states differ by {gap:.1%} from those of its own attention ({own})" if gap > limit else None


def _trial_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """Ours, with notes; a layer that was not handed the packing gets zeros, so that the pass ends as passes do."""
    packing = given.get("packing")
    if packing is None:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    packing.windows.append(given.get("sliding_window"))
    causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        packing.bidirectional.append(type(module).__name__)
    return packed_attention(module, query, key, value, attention_mask, **given)
