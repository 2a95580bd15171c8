"""One forward pass over padded rows: padding is taken out before, and fields are put back at response columns after.

Each row's attended tokens move to the front, so neither the amount nor the side of padding, nor what ids stand in it,
reaches the model. A causal model then needs no attention mask (padding only follows), which leaves the fast kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.models.heads import chunk_rows_for, label_statistics, logit_head

FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "sequence_classification": ("scores",),
}


@dataclass(frozen=True)
class FrontRows:
    """Rows with their attended tokens in front, and where each response token came from."""

    input_ids: torch.Tensor
    """[b, n], n the longest row."""
    attention_mask: torch.Tensor
    """[b, n]."""
    rows: torch.Tensor
    """[N] row of each attended response token."""
    columns: torch.Tensor
    """[N] its column in `responses`."""
    before: torch.Tensor
    """[N] the place in `input_ids` of the token before it, whose hidden state predicts it."""
    labels: torch.Tensor
    """[N] its id."""

    def to(self, device: torch.device) -> FrontRows:
        return FrontRows(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})


def front_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_length: int = 0, pad_token_id: int = 0
) -> FrontRows:
    """`input_ids`, `attention_mask` [b, P+R] -> the rows without their padding; the last R columns are responses."""
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1)
    longest = max(1, int(lengths.max())) if len(lengths) else 1
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    attended = torch.arange(longest, device=mask.device) < lengths[:, None]
    ids = torch.where(attended, input_ids.gather(1, order), pad_token_id)
    place = mask.long().cumsum(dim=1) - 1
    first = mask.shape[1] - response_length
    rows, columns = mask[:, first:].nonzero(as_tuple=True)
    before = place[rows, first + columns] - 1
    if bool((before < 0).any()):
        row = int(rows[before < 0][0])
        raise ValueError(
            f"attention_mask: row {row} has a response but no prompt token before it. Every prompt needs at least one."
        )
    return FrontRows(ids, attended.long(), rows, columns, before, input_ids[rows, first + columns])


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
        if kind == "sequence_classification" and config.num_labels != 1:
            raise ValueError(
                f"reward_model.path: the model has {config.num_labels} labels; a score is one number. "
                "Give a model with num_labels=1."
            )

    def forward(
        self, front: FrontRows, fields: Sequence[str], shape: tuple[int, int], temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The named `fields`, float32 `shape` [b, R] with 0 at padding; `scores` [b]; `head_gap` as one number."""
        if "head_gap" in fields:
            return {"head_gap": self._head_gap(front)}
        if self.kind == "sequence_classification":
            return {"scores": self._scores(front)}
        hidden = self._hidden(front)[front.rows, front.before]
        if self.kind == "value":
            return {"values": _scattered(self.hf.score(hidden).squeeze(-1).float(), front, shape)}
        log_probs, entropy = label_statistics(
            hidden,
            front.labels,
            logit_head(self.hf),
            temperature,
            with_entropy="entropy" in fields,
            chunk_rows=chunk_rows_for(self.hf.config.get_text_config().vocab_size),
        )
        found = {"log_probs": log_probs, "entropy": entropy}
        return {name: _scattered(value, front, shape) for name, value in found.items() if name in fields}

    def _hidden(self, front: FrontRows) -> torch.Tensor:
        output = self.hf.base_model(input_ids=front.input_ids, use_cache=False)
        return output.last_hidden_state

    def _head_gap(self, front: FrontRows) -> torch.Tensor:
        """How far our logits are from those of the model's own forward pass, relative to the largest."""
        ours = logit_head(self.hf)(self._hidden(front))
        own = self.hf(input_ids=front.input_ids, use_cache=False).logits.float()
        return (ours - own).abs().max() / own.abs().max().clamp(min=1e-6)

    def _scores(self, front: FrontRows) -> torch.Tensor:
        if hasattr(self.hf, "score"):  # a decoder: its last token has read everything
            last = front.attention_mask.sum(dim=1).clamp(min=1) - 1
            hidden = self._hidden(front)[torch.arange(len(last), device=last.device), last]
            return self.hf.score(hidden).squeeze(-1).float()
        logits = self.hf(input_ids=front.input_ids, attention_mask=front.attention_mask).logits
        return logits.squeeze(-1).float()


def _scattered(values: torch.Tensor, front: FrontRows, shape: tuple[int, int]) -> torch.Tensor:
    """[N] -> [b, R] with 0 elsewhere; only real positions are part of the graph."""
    empty = torch.zeros(shape, dtype=values.dtype, device=values.device)
    return empty.index_put((front.rows, front.columns), values)
