"""PrefixSharing: common prefixes of the rows of a pass, which an engine computes once, and what that saves."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from verl.config.engine import PREFIX_MIN_SAVING
from verl.models.packing import PackedRows, packed_tokens
from verl.models.prefix_tree import prefix_order, token_bytes
from verl.models.shared_prefixes import TreeAttention, TreePacking, shared_rows
from verl.protocol import DataProto
from verl.utils.balancing import SequenceCost
from verl.workers.engine.base import Metrics
from verl.workers.engine.common.prefix_batches import SharedPrefixes
from verl.workers.engine.common.routers import ROUTED_EXPERTS

logger = logging.getLogger(__name__)


def supported_mode(mode: str, obstacle: str | None) -> str:
    """Return the mode of an engine that cannot share prefixes because of `obstacle`: auto becomes false, which is
    logged; raises ValueError for true. Without an obstacle the mode is unchanged."""
    if obstacle is None or mode == "false":
        return mode
    if mode == "true":
        raise ValueError(f"use_prefix_grouper: prefixes cannot be shared: {obstacle}. Set it to auto or False.")
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("use_prefix_grouper=auto: prefixes are not shared: %s", obstacle)
    return "false"


class PrefixSharing:
    """Decides for each pass of an engine whether prefixes are shared, and applies it to every micro-batch."""

    def __init__(self, mode: str, cost: SequenceCost, whole_rows: bool = False, replays_experts: bool = False) -> None:
        """`mode`: true, false or auto. `cost`: operations of a row. `replays_experts`: tokens are shared only if their
        `routed_experts` agree.

        `whole_rows`: attention expands shared tokens to whole rows, without a kernel for them. Token budgets then count
        all tokens of a row, so that attention needs the memory of a pass without sharing, and only the layers save.
        """
        self.mode = mode
        self.whole_rows = whole_rows
        self._cost = cost
        self.attention: TreeAttention | None = None
        """Implementation of attention; None: selected by size."""
        self._replays_experts = replays_experts
        self._active = False
        self.required_tokens = self.computed_tokens = 0
        """Of the current pass, without and with sharing."""
        self._required_work = self._saved_work = 0.0

    def begin(self, data: DataProto) -> SharedPrefixes | None:
        """Start a pass over `data`. Returns the common prefixes of its rows; None if they are not shared."""
        self.required_tokens = self.computed_tokens = 0
        self._required_work = self._saved_work = 0.0
        self._active = False
        if self.mode == "false":
            return None
        prefixes = replace(find_shared_prefixes(data, self._experts(data)), whole_rows=self.whole_rows)
        self._active = prefixes.saving > 0 and (self.mode == "true" or prefixes.saving >= PREFIX_MIN_SAVING)
        return prefixes if self._active else None

    def apply(self, rows: PackedRows, part: DataProto) -> PackedRows:
        """Return the packed rows of micro-batch `part` with common prefixes computed once, if this pass shares them."""
        self.required_tokens += rows.packing.total
        self._required_work += float(self._cost(rows.packing.lengths).sum()) + self._cost.head * len(rows.rows)
        if self._active:
            experts = self._experts(part)
            mask = None if experts is None else packed_tokens(part.batch["attention_mask"])
            rows = shared_rows(rows, None if experts is None else experts[mask], self.attention)
        self.computed_tokens += rows.packing.total
        if isinstance(rows.packing, TreePacking):
            shared = rows.packing.tree.shared
            self._saved_work += float((self._cost.token * shared if self.whole_rows else self._cost(shared)).sum())
        return rows

    def metrics(self) -> Metrics:
        """Return the fractions of the tokens and of the operations of the last pass that were not computed."""
        if self.mode == "false":
            return {}
        return {
            "prefix_saving": (self.required_tokens - self.computed_tokens, max(1, self.required_tokens)),
            "prefix_saving_flops": (self._saved_work, max(1.0, self._required_work)),
        }

    def _experts(self, data: DataProto) -> torch.Tensor | None:
        """Return the replayed experts [rows, columns, layers, k]."""
        return data.batch[ROUTED_EXPERTS] if self._replays_experts and ROUTED_EXPERTS in data.batch.keys() else None


def find_shared_prefixes(data: DataProto, experts: torch.Tensor | None = None) -> SharedPrefixes:
    """Return the common prefixes of the rows. `experts` [rows, columns, ...]: tokens are shared only if these agree."""
    mask = packed_tokens(data.batch["attention_mask"])
    rows = []
    for row, packed in enumerate(mask):  # one row at a time: bytes of all experts may need gigabytes
        ids = data.batch["input_ids"][row, packed].numpy()
        rows.append(token_bytes(ids, None if experts is None else experts[row, packed].numpy()).tobytes())
    lengths = mask.sum(dim=1).numpy()
    width = max((len(row) // int(length) for row, length in zip(rows, lengths, strict=True)), default=1)
    order, shared = prefix_order(rows, width)
    columns = data.batch["responses"].shape[1] if "responses" in data.batch.keys() else 0
    responses = data.batch["attention_mask"][:, mask.shape[1] - columns :].sum(dim=1).numpy()
    return SharedPrefixes(order, shared, lengths[order], responses[order])
