"""PrefixSharing: common prefixes of the rows of a pass, which an engine computes once, and what that saves."""

from __future__ import annotations

import torch

from verl.config.engine import PREFIX_MIN_SAVING
from verl.models.packing import PackedRows, packed_tokens
from verl.models.prefix_tree import prefix_order, token_bytes
from verl.models.shared_prefixes import TreeAttention, shared_rows
from verl.protocol import DataProto
from verl.workers.engine.base import Metrics
from verl.workers.engine.common.prefix_batches import SharedPrefixes
from verl.workers.engine.common.routers import ROUTED_EXPERTS


class PrefixSharing:
    """Decides for each pass of an engine whether prefixes are shared, and applies it to every micro-batch."""

    def __init__(self, mode: str, replays_experts: bool = False) -> None:
        """`mode`: true, false or auto. `replays_experts`: tokens are shared only if their `routed_experts` agree."""
        self.mode = mode
        self.attention: TreeAttention | None = None
        """Implementation of attention; None: selected by size."""
        self._replays_experts = replays_experts
        self._active = False
        self.required_tokens = self.computed_tokens = 0
        """Of the current pass, without and with sharing."""

    def begin(self, data: DataProto) -> SharedPrefixes | None:
        """Start a pass over `data`. Returns the common prefixes of its rows; None if they are not shared."""
        self.required_tokens = self.computed_tokens = 0
        self._active = False
        if self.mode == "false":
            return None
        prefixes = find_shared_prefixes(data, self._experts(data))
        self._active = prefixes.saving > 0 and (self.mode == "true" or prefixes.saving >= PREFIX_MIN_SAVING)
        return prefixes if self._active else None

    def apply(self, rows: PackedRows, part: DataProto) -> PackedRows:
        """Return the packed rows of micro-batch `part` with common prefixes computed once, if this pass shares them."""
        self.required_tokens += rows.packing.total
        if self._active:
            experts = self._experts(part)
            mask = None if experts is None else packed_tokens(part.batch["attention_mask"])
            rows = shared_rows(rows, None if experts is None else experts[mask], self.attention)
        self.computed_tokens += rows.packing.total
        return rows

    def metrics(self) -> Metrics:
        """Return the fraction of the tokens of the last pass that was not computed."""
        if self.mode == "false":
            return {}
        return {"prefix_saving": (self.required_tokens - self.computed_tokens, max(1, self.required_tokens))}

    def _experts(self, data: DataProto) -> torch.Tensor | None:
        """Return the replayed experts [rows, columns, layers, k]."""
        return data.batch[ROUTED_EXPERTS] if self._replays_experts and ROUTED_EXPERTS in data.batch.keys() else None


def find_shared_prefixes(data: DataProto, experts: torch.Tensor | None = None) -> SharedPrefixes:
    """Return the common prefixes of the rows. `experts` [rows, columns, ...]: tokens are shared only if these agree."""
    mask = packed_tokens(data.batch["attention_mask"])
    lengths = mask.sum(dim=1).numpy()
    tokens = token_bytes(data.batch["input_ids"][mask].numpy(), None if experts is None else experts[mask].numpy())
    ends = lengths.cumsum()
    rows = [tokens[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]
    order, shared = prefix_order(rows, tokens.shape[1])
    return SharedPrefixes(order, shared, lengths[order])
