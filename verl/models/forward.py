"""One forward pass over padded rows: padding is taken out before, and fields are put back at response columns after.

Nothing of padding reaches the model. Packed rows have none left. Where a model cannot attend packed, each row's tokens
move to the front: padding only follows, so a causal model needs no attention mask and runs the fast kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from verl.models.fused_head import label_statistics
from verl.models.heads import head_weights, logit_adjustment, logit_head
from verl.models.packing import PackedRows, TokenRows, refuse_lone_responses
from verl.models.sharing import SharedRows
from verl.models.top_tokens import TopTokens, top_tokens
from verl.utils.device import copy_to_device

FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy", "other_log_probs", "top_ids", "top_log_probs"),
    "value": ("values", "last_value"),
    "sequence_classification": ("scores",),
}
# One number per row; all others have one per response token, or several: `other_log_probs`, of tokens that the rows
# name beside each, and `top_ids` with `top_log_probs`, the likeliest ones.
FIELDS_OF_ROWS = ("scores", "last_value")


@dataclass(frozen=True, kw_only=True)
class FrontRows(TokenRows):
    """Rows with their attended tokens in front, as wide as the longest."""

    attention_mask: torch.Tensor
    """[b, n]."""

    def to(self, device: torch.device) -> FrontRows:
        """Without waiting for it."""
        return FrontRows(**dict(zip(vars(self), copy_to_device(list(vars(self).values()), device), strict=True)))


Rows: TypeAlias = "FrontRows | PackedRows"
"""What a forward pass takes."""


def front_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_length: int = 0, pad_token_id: int = 0
) -> FrontRows:
    """`input_ids`, `attention_mask` [b, P+R] -> the rows without their padding; the last R columns are responses."""
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1)
    longest = max(1, int(lengths.max())) if len(lengths) else 1
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    attended = torch.arange(longest) < lengths[:, None]
    ids = torch.where(attended, input_ids.gather(1, order), pad_token_id)
    place = mask.long().cumsum(dim=1) - 1
    first = mask.shape[1] - response_length
    rows, columns = mask[:, first:].nonzero(as_tuple=True)
    in_row = place[rows, first + columns]
    refuse_lone_responses(rows, in_row)
    starts = torch.arange(len(mask)) * longest
    return FrontRows(
        input_ids=ids,
        attention_mask=attended.long(),
        rows=rows,
        columns=columns,
        before=starts[rows] + in_row - 1,
        labels=input_ids[rows, first + columns],
        last=starts + lengths.clamp(min=1) - 1,
    )


class ResponseModel(nn.Module):
    """A Hugging Face model (or ValueModel) whose forward pass gives per-token fields at response columns.

    It is the root module that an engine shards: heads run inside its forward pass, where their weights are gathered.
    """

    def __init__(self, hf: nn.Module, kind: str) -> None:
        super().__init__()
        self.hf: Any = hf
        self.kind = kind
        config = self.hf.config
        self.pad_token_id = getattr(config.get_text_config(), "pad_token_id", None) or 0
        check_labels(kind, config)

    def forward(
        self, rows: Rows, fields: Sequence[str], shape: tuple[int, int], temperature: float = 1.0, top_k: int = 0
    ) -> dict[str, torch.Tensor]:
        """The named `fields`, float32 `shape` [b, R] with 0 at padding; `scores` and `last_value` [b]; `top_ids` and
        `top_log_probs` [b, R, `top_k`], without gradients.

        Two more, for trials: `hidden` [tokens, H] and, of rows with padding, `head_gap` as one number.
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
        hidden = hidden.index_select(0, rows.before)
        weight, bias = head_weights(self.hf)
        adjust = logit_adjustment(self.hf.config)
        if top_k:
            top = top_tokens(hidden, weight, rows.labels, temperature, top_k, bias=bias, adjust=adjust)
            found = top_fields(top)
        else:
            found = label_fields(
                *label_statistics(
                    hidden, weight, rows.labels, temperature, "entropy" in fields, bias=bias, adjust=adjust
                )
            )
        return {name: scattered(found[name], rows, shape) for name in fields}

    def _hidden(self, rows: Rows) -> torch.Tensor:
        """[tokens, H], in the order of the flattened `rows.input_ids`."""
        packed = {"position_ids": rows.position_ids, "packing": rows.packing} if isinstance(rows, PackedRows) else {}
        output = self.hf.base_model(input_ids=rows.input_ids, use_cache=False, **packed)
        return output.last_hidden_state.flatten(0, 1)

    def _values(
        self, hidden: torch.Tensor, rows: Rows, fields: Sequence[str], shape: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Of the states before the response tokens and, if asked for, after each row's last token; one pass of the head
        for both: its weights are gathered once."""
        if "last_value" not in fields:
            return {"values": scattered(self._scored(hidden, rows.before), rows, shape)}
        before, last = self._scored(hidden, torch.cat([rows.before, rows.last])).split(
            [len(rows.before), len(rows.last)]
        )
        found = {"values": scattered(before, rows, shape), "last_value": of_rows(last, rows)}
        return {name: found[name] for name in fields}

    def _scored(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What the head gives for the states at `places` [n]."""
        return self.hf.score(hidden.index_select(0, places)).squeeze(-1).float()

    def _head_gap(self, rows: Rows) -> torch.Tensor:
        """How far our logits are from those of the model's own forward pass, relative to the largest."""
        ours = logit_head(self.hf)(self._hidden(rows))
        own = self.hf(input_ids=rows.input_ids, use_cache=False).logits.flatten(0, 1).float()
        return (ours - own).abs().max() / own.abs().max().clamp(min=1e-6)

    def _scores(self, rows: Rows) -> torch.Tensor:
        if hasattr(self.hf, "score"):  # a decoder: its last token has read everything
            return of_rows(self._scored(self._hidden(rows), rows.last), rows)
        assert isinstance(rows, FrontRows), "an encoder runs with padding"
        logits = self.hf(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
        return logits.squeeze(-1).float()


def label_fields(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, Any]:
    """What `label_statistics` found, by field; of labels [N, 1 + K] the first is the token's own."""
    if log_probs.dim() == 1:
        return {"log_probs": log_probs, "entropy": entropy}
    return {"log_probs": log_probs[:, 0], "other_log_probs": log_probs[:, 1:], "entropy": entropy}


def top_fields(top: TopTokens) -> dict[str, torch.Tensor]:
    """What `top_tokens` found, by field."""
    return {"log_probs": top.log_probs, "top_ids": top.ids, "top_log_probs": top.top_log_probs}


def check_labels(kind: str, config: Any) -> None:
    """ValueError for a classifier that gives several numbers."""
    if kind == "sequence_classification" and config.num_labels != 1:
        raise ValueError(
            f"reward_model.path: the model has {config.num_labels} labels; a score is one number. "
            "Give a model with num_labels=1."
        )


def of_rows(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[b]: those that ranks which share the rows found, too. Never a view, which loses FSDP's hook if it is written."""
    return rows.of_rows(values) if isinstance(rows, SharedRows) else values.clone()


def scattered(values: torch.Tensor, rows: Rows, shape: tuple[int, int]) -> torch.Tensor:
    """[N, …] -> [b, R, …] with 0 elsewhere; only real positions are part of the graph."""
    if isinstance(rows, SharedRows):
        values = rows.of_responses(values)
    empty = torch.zeros((*shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return empty.index_put((rows.rows, rows.columns), values)
