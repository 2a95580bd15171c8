"""Runtime checks of a model: is the output head computed correctly, and does packed attention give the same results?"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from verl.models.attention import packed_attention, unsupported_layers, use_packed_attention, window_mismatch
from verl.models.forward import ResponseModel
from verl.models.packing import Packing, packed_rows, right_padded_rows

logger = logging.getLogger(__name__)

_CHECKED_ATTENTION = "verl_packed_check"
# Rounding errors of half precision are a part of it.
_MAX_LOGIT_DIFFERENCE = 0.02


def check_head(model: ResponseModel, device: torch.device) -> None:
    """Raise ValueError for a causal LM whose logits for a few tokens differ from those of `logit_head`.

    It runs a forward pass, which is a collective if the model is sharded; requires no_grad and eval mode.
    """
    if model.kind != "causal_lm":
        return
    probe = torch.arange(1, 9)[None] % model.hf.config.get_text_config().vocab_size
    rows = right_padded_rows(probe, torch.ones_like(probe), response_length=1).to(device)
    gap = float(model(rows, ("head_gap",), (1, 1))["head_gap"])
    if gap > _MAX_LOGIT_DIFFERENCE:
        raise ValueError(
            f"model.path: {type(model.hf).__name__} adjusts its logits after the output layer in an unknown way "
            f"(they differ by {gap:.1%}). Use another model, or add the adjustment to verl.models.logits."
        )


def enable_packed_attention(model: ResponseModel, device: torch.device) -> bool:
    """Switch `model` to packed attention if it supports it, and return whether it does; otherwise log the reason.

    With packed attention it takes PackedRows. Runs forward passes, which are collectives if the model is sharded;
    requires no_grad and eval mode.
    """
    hf = model.hf if hasattr(model.hf, "set_attn_implementation") else model.hf.base_model
    reason = _unsupported(model, hf) or _difference(model, hf, device)
    if reason is None:
        use_packed_attention(hf)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("use_remove_padding: %s runs with padding: %s", type(hf).__name__, reason)
    return reason is None


class _RecordingPacking(Packing):
    """A packing that records the attention calls it is passed to."""

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing.cu_seqlens, packing.lengths, packing.max_length)
        self.windows: list[int | None] = []
        self.bidirectional: list[str] = []


def _unsupported(model: ResponseModel, hf: Any) -> str | None:
    """Return why class or config of a model exclude packed attention, or None."""
    if hf.config.is_encoder_decoder or (model.kind == "sequence_classification" and not hasattr(hf, "score")):
        return "it has an encoder"
    if getattr(hf, "_is_stateful", False):
        return "its layers have a recurrent state"
    return unsupported_layers(hf, hf.config.get_text_config())


def _difference(model: ResponseModel, hf: Any, device: torch.device) -> str | None:
    """Compare a packed with a padded pass; return why the model does not support packed attention, or None."""
    from transformers import AttentionInterface

    config = hf.config.get_text_config()
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    ids = (torch.arange(1, 15) % config.vocab_size).view_as(mask)
    padded = model(right_padded_rows(ids, mask).to(device), ("hidden",), (2, 0))["hidden"]
    original = hf.config._attn_implementation
    AttentionInterface.register(_CHECKED_ATTENTION, _recording_attention)
    hf.set_attn_implementation(_CHECKED_ATTENTION)
    rows = packed_rows(ids, mask).to(device)
    recording = _RecordingPacking(rows.packing)
    packed = model(replace(rows, packing=recording), ("hidden",), (2, 0))["hidden"]
    hf.set_attn_implementation(original)
    if not recording.windows:
        return "its layers do not pass arguments to the attention interface"
    if recording.bidirectional:
        return f"{recording.bidirectional[0]} attends to later tokens"
    if len(recording.windows) != config.num_hidden_layers:
        return f"{len(recording.windows)} of its {config.num_hidden_layers} layers use the attention interface"
    window = window_mismatch(config, recording.windows)
    if window is not None:
        return window
    padded = padded.float()[mask.flatten().nonzero()[:, 0].to(device)]
    gap = float((packed.float() - padded).abs().max() / padded.abs().max())
    # A gap of NaN (weights that are not finite) says nothing about the architecture and is accepted.
    limit = 1e-3 if packed.dtype == torch.float32 else 0.05
    return (
        f"its hidden states differ by {gap:.1%} from those of its own attention ({original})" if gap > limit else None
    )


def _recording_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """`packed_attention` that records its calls; returns zeros if a layer does not pass `packing`."""
    packing = arguments.get("packing")
    if packing is None:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    packing.windows.append(arguments.get("sliding_window"))
    causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        packing.bidirectional.append(type(module).__name__)
    return packed_attention(module, query, key, value, attention_mask, **arguments)
