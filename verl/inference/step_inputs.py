"""The numbers of one step on the device: a plan's lists packed into one buffer and sent by one copy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from verl.inference.step_plan import StepPlan

__all__ = ["InputSender", "StepInputs"]

# The host may be one step ahead of the device, so two buffers are in use at a time; the third is being filled.
_BUFFERS = 3


@dataclass(slots=True)
class StepInputs:
    """What a step computes, int64 on the device. T tokens: those of the prefills, then one per decode."""

    token_rows: torch.Tensor
    """[T]: slot of the sequence a token belongs to."""
    positions: torch.Tensor
    """[T]: where it stands in its sequence."""
    prefill_ids: torch.Tensor
    """[prefill tokens]: token ids; those of decodes are on the device already."""
    query_starts: torch.Tensor
    """[sequences + 1]: first token of each sequence of the step, prefills first."""
    sequence_rows: torch.Tensor
    """[sequences]: slots."""
    lengths: torch.Tensor
    """[sequences]: KV length after the step."""
    sampled_tokens: torch.Tensor
    """[samples]: which token's hidden state each sample is drawn from."""
    sample_rows: torch.Tensor
    """[samples]: slots."""
    sample_positions: torch.Tensor
    """[samples]: where the sampled token will stand."""
    table_entries: torch.Tensor
    """[updates]: flat index into the block tables."""
    table_blocks: torch.Tensor
    """[updates]"""


class InputSender:
    """Sends plans to a device."""

    def __init__(self, device: torch.device, table_width: int) -> None:
        self._device = device
        self._width = table_width
        self._turn = 0
        self._pinned = [torch.empty(0, dtype=torch.int64)] * _BUFFERS
        self._landed = [torch.empty(0, dtype=torch.int64)] * _BUFFERS

    def send(self, plan: StepPlan) -> StepInputs:
        """The plan's numbers. Valid until two more plans were sent."""
        lists = _flat(plan, self._width)
        ends = np.cumsum([len(values) for values in lists])
        numbers = np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(ends[-1]))
        tensors = self._on_device(numbers).tensor_split(ends[:-1].tolist())
        return StepInputs(*tensors)

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(numbers)
        turn, size = self._turn, len(numbers)
        self._turn = (turn + 1) % _BUFFERS
        if self._pinned[turn].numel() < size:
            self._pinned[turn] = torch.empty(2 * size, dtype=torch.int64, pin_memory=True)
            self._landed[turn] = torch.empty(2 * size, dtype=torch.int64, device=self._device)
        self._pinned[turn].numpy()[:size] = numbers
        landed = self._landed[turn][:size]
        landed.copy_(self._pinned[turn][:size], non_blocking=True)
        return landed


def _flat(plan: StepPlan, width: int) -> list[list[int]]:
    """The fields of StepInputs, in order."""
    rows: list[int] = []
    positions: list[int] = []
    ids: list[int] = []
    starts = [0]
    lengths: list[int] = []
    sampled: list[int] = []
    for chunk in plan.prefills:
        count = len(chunk.token_ids)
        rows += [chunk.slot] * count
        positions += range(chunk.start, chunk.start + count)
        ids += chunk.token_ids
        lengths.append(chunk.start + count)
        sampled += [starts[-1] + count - 1] * len(chunk.samples)
        starts.append(starts[-1] + count)
    first = starts[-1]
    decodes = range(first, first + len(plan.decodes))
    return [
        rows + plan.decodes,
        positions + plan.positions,
        ids,
        [*starts, *(token + 1 for token in decodes)],
        [chunk.slot for chunk in plan.prefills] + plan.decodes,
        lengths + [position + 1 for position in plan.positions],
        [*sampled, *decodes],
        plan.sample_slots,
        plan.sample_positions,
        [slot * width + column for slot, column, _ in plan.block_updates],
        [block for _, _, block in plan.block_updates],
    ]
