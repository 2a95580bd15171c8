"""ResponseModel: a forward pass over rows without left padding, with results scattered to response columns.

Rows are packed (`PackedRows`), or, if a model does not support packed attention, padded on the right
(`RightPaddedRows`), so that a causal model needs no attention mask and can use fast kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from verl.models.fused_head import label_statistics
from verl.models.logits import TopTokens, head_weights, logit_adjustment, logit_head, top_tokens
from verl.models.packing import PackedRows, RightPaddedRows, SequenceParallelRows
from verl.models.shared_prefixes import TreePacking, gather_tokens

FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy", "other_log_probs", "top_ids", "top_log_probs"),
    "value": ("values", "last_value"),
    "sequence_classification": ("scores",),
}
# Fields with one number per row; others have one per response token, or K: `other_log_probs` of the alternative tokens
# in `labels`, `top_ids` and `top_log_probs` of the most likely tokens.
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

        Two more for `model_checks`: `hidden` [tokens, H] and, of rows with padding, the scalar `head_gap`.
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
                    hidden, weight, rows.labels, temperature, "entropy" in fields, bias=bias, adjust=adjust
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


def label_statistics_fields(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, Any]:
    """Return results of `label_statistics` by field; of labels [N, 1 + K] the first is the response token."""
    if log_probs.dim() == 1:
        return {"log_probs": log_probs, "entropy": entropy}
    return {"log_probs": log_probs[:, 0], "other_log_probs": log_probs[:, 1:], "entropy": entropy}


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
