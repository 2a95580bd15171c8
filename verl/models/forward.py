"""ResponseModel: a forward pass over rows without left padding, with results scattered to response columns.

Rows are packed (`PackedRows`), or, if a model does not support packed attention, padded on the right
(`RightPaddedRows`), so that a causal model needs no attention mask and can use fast kernels. `check_head` and
`enable_packed_attention` check on a loaded model that its results are correct.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from verl.models.attention import packed_attention, unsupported_layers, use_packed_attention, window_mismatch
from verl.models.fused_head import label_statistics
from verl.models.logits import TopTokens, head_weights, logit_adjustment, logit_head, top_tokens
from verl.models.packing import (
    PackedRows,
    Packing,
    RightPaddedRows,
    SequenceParallelRows,
    packed_rows,
    right_padded_rows,
)
from verl.models.shared_prefixes import TreePacking, gather_tokens

logger = logging.getLogger(__name__)

FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy", "entropy_value", "other_log_probs", "top_ids", "top_log_probs"),
    "value": ("values", "last_value"),
    "sequence_classification": ("scores",),
}
# Fields with one number per row. Other fields have one number per response token, or K: `other_log_probs` (of the
# alternative tokens in `labels`), `top_ids` and `top_log_probs` (of the most likely tokens). `entropy_value` is the
# entropy without gradient.
FIELDS_OF_ROWS = ("scores", "last_value")
# Parts of the hidden size whose gradients are summed in float32 at a time.
_GRADIENT_CHUNKS = 8

Rows: TypeAlias = "RightPaddedRows | PackedRows"
"""Input of a forward pass."""


class ResponseModel(nn.Module):
    """A Hugging Face model (or ValueModel) whose forward pass returns per-token fields at response columns.

    It is the root module that an engine shards: heads run inside its forward pass, where their weights are gathered.
    """

    def __init__(self, hf: nn.Module, kind: str) -> None:
        super().__init__()
        self.hf: Any = hf
        self.kind = kind
        config = self.hf.config
        self.pad_token_id = getattr(config.get_text_config(), "pad_token_id", None) or 0
        check_single_label(kind, config)

    def forward(
        self, rows: Rows, fields: Sequence[str], shape: tuple[int, int], temperature: float = 1.0, top_k: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the named `fields`, float32 `shape` [b, R] with 0 at padding; `scores` and `last_value` [b]; `top_ids`
        and `top_log_probs` [b, R, `top_k`], without gradients.

        Two more fields are for checks of a model: `hidden` [tokens, H] and, only for rows with padding, the scalar
        `head_gap`.
        """
        if "head_gap" in fields:
            return {"head_gap": self._head_gap(rows)}
        if "hidden" in fields:
            return {"hidden": self._hidden(rows)}
        if self.kind == "sequence_classification":
            return {"scores": self._scores(rows)}
        hidden = self._hidden(rows)
        if self.kind == "value":
            return self._values(hidden, rows, fields, shape)
        hidden = select_states(hidden, rows.before, rows)
        weight, bias = head_weights(self.hf)
        adjust = logit_adjustment(self.hf.config)
        if top_k:
            top = top_tokens(hidden, weight, rows.labels, temperature, top_k, bias=bias, adjust=adjust)
            per_token = top_token_fields(top)
        else:
            per_token = label_statistics_fields(
                *label_statistics(
                    hidden, weight, rows.labels, temperature, bias=bias, adjust=adjust, **entropy_options(fields)
                )
            )
        return {name: scatter_to_responses(per_token[name], rows, shape) for name in fields}

    def _hidden(self, rows: Rows) -> torch.Tensor:
        """Return hidden states [tokens, H] in the order of the flattened `rows.input_ids`."""
        packed = {"position_ids": rows.position_ids, "packing": rows.packing} if isinstance(rows, PackedRows) else {}
        output = self.hf.base_model(input_ids=rows.input_ids, use_cache=False, **packed)
        return output.last_hidden_state.flatten(0, 1)

    def _values(
        self, hidden: torch.Tensor, rows: Rows, fields: Sequence[str], shape: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Return values of the states before response tokens and, if `last_value` is a field, after each row's last
        token. The head is called once for both, so that its weights are gathered once."""
        if "last_value" not in fields:
            return {"values": scatter_to_responses(self._score(hidden, rows.before, rows), rows, shape)}
        before, last = self._score(hidden, torch.cat([rows.before, rows.last]), rows).split(
            [len(rows.before), len(rows.last)]
        )
        results = {"values": scatter_to_responses(before, rows, shape), "last_value": gather_row_values(last, rows)}
        return {name: results[name] for name in fields}

    def _score(self, hidden: torch.Tensor, index: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Apply the head to the states at `index` [n]."""
        return self.hf.score(select_states(hidden, index, rows)).squeeze(-1).float()

    def _head_gap(self, rows: Rows) -> torch.Tensor:
        """Return the maximum difference between `logit_head` and the logits of the model's forward pass, relative to
        the largest logit."""
        logits = logit_head(self.hf)(self._hidden(rows))
        expected = self.hf(input_ids=rows.input_ids, use_cache=False).logits.flatten(0, 1).float()
        return (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)

    def _scores(self, rows: Rows) -> torch.Tensor:
        if hasattr(self.hf, "score"):  # a decoder: only the last token attends to the whole row
            return gather_row_values(self._score(self._hidden(rows), rows.last, rows), rows)
        assert isinstance(rows, RightPaddedRows), "an encoder runs with padding"
        logits = self.hf(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
        return logits.squeeze(-1).float()


def select_states(hidden: torch.Tensor, index: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the states [n, H] of the tokens at `index`, which rows with a common prefix may share."""
    if isinstance(rows, PackedRows) and isinstance(rows.packing, TreePacking):
        return gather_tokens(hidden, index, _GRADIENT_CHUNKS)
    return hidden.index_select(0, index)


def entropy_options(fields: Sequence[str]) -> dict[str, bool]:
    """Return the arguments of `label_statistics` for the entropy in these fields: `entropy_value` has no gradient."""
    return {
        "with_entropy": "entropy" in fields or "entropy_value" in fields,
        "entropy_has_gradient": "entropy" in fields,
    }


def label_statistics_fields(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, Any]:
    """Return results of `label_statistics` by field; of labels [N, 1 + K] the first is the response token."""
    entropies = {"entropy": entropy, "entropy_value": entropy}
    if log_probs.dim() == 1:
        return {"log_probs": log_probs, **entropies}
    return {"log_probs": log_probs[:, 0], "other_log_probs": log_probs[:, 1:], **entropies}


def top_token_fields(top: TopTokens) -> dict[str, torch.Tensor]:
    """Return results of `top_tokens` by field."""
    return {"log_probs": top.log_probs, "top_ids": top.ids, "top_log_probs": top.top_log_probs}


def check_single_label(kind: str, config: Any) -> None:
    """Raise ValueError for a classifier with several labels."""
    if kind == "sequence_classification" and config.num_labels != 1:
        raise ValueError(
            f"reward_model.path: the model has {config.num_labels} labels, but a reward model needs one. "
            "Use a model with num_labels=1."
        )


def gather_row_values(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return one value per row [b], gathered from sequence-parallel ranks. Never a view, because an in-place write to a
    view would remove FSDP's backward hook."""
    return rows.gather_rows(values) if isinstance(rows, SequenceParallelRows) else values.clone()


def scatter_to_responses(values: torch.Tensor, rows: Rows, shape: tuple[int, int]) -> torch.Tensor:
    """Scatter values of response tokens [N, …] to [b, R, …], 0 elsewhere."""
    if isinstance(rows, SequenceParallelRows):
        values = rows.gather_responses(values)
    zeros = torch.zeros((*shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return zeros.index_put((rows.rows, rows.columns), values)


_CHECKED_ATTENTION = "verl_packed_check"
# Relative difference that rounding errors of half precision do not exceed.
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
    """Return why the class or config of a model excludes packed attention, or None."""
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
