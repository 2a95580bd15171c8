"""Sampler: the next token of chosen slots. Each slot's parameters lie on the device from the day it is taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.inference.logit_shaper import LogitShaper
from verl.inference.token_sampling import SampledRows, SamplingBatch, sample_tokens
from verl.types.request import SamplingParams
from verl.utils.device_copy import copied_together

__all__ = ["Sampler"]


class Sampler:
    """Parameters of `slots` slots as columns on the device; a step gathers the rows it samples."""

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._shaper = LogitShaper(slots, max_model_len, device)
        self._columns = SamplingBatch.of([SamplingParams()] * slots, device)
        # What is true of any row decides which operations run; kept here, so that asking costs no look at the device.
        self._truncated: set[int] = set()
        self._greedy: set[int] = set()
        self._tempered: set[int] = set()

    def assign(
        self, taken: Sequence[tuple[int, SamplingParams]], histories: Sequence[tuple[int, int, list[int]]] = ()
    ) -> None:
        """These slots belong to new sequences; `histories` as in StepPlan."""
        if not taken:
            return
        self._shaper.assign(taken, histories)
        rows = SamplingBatch.of([params for _, params in taken], self._device)
        (index,) = copied_together([torch.tensor([slot for slot, _ in taken], dtype=torch.int64)], self._device)
        for name in ("keys", "temperature", "greedy", "top_k", "top_p", "min_p"):
            getattr(self._columns, name).index_copy_(0, index, getattr(rows, name))
        for slot, params in taken:
            (self._truncated.add if params.truncated else self._truncated.discard)(slot)
            (self._greedy.add if params.greedy else self._greedy.discard)(slot)
            (self._tempered.discard if params.temperature in (0, 1) else self._tempered.add)(slot)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        index: torch.Tensor,
        positions: torch.Tensor,
        banned: Sequence[tuple[int, int]],
    ) -> SampledRows:
        """One token per row of `logits` [rows, vocab]; row i belongs to slot slots[i], which is index[i] on the device.

        `positions` [rows] int64: where each token will stand in its sequence.
        """
        truncated = not self._truncated.isdisjoint(slots)
        shape = self._shaper.shape(slots, index, positions)
        if self._device.type == "cuda" and not truncated and not banned and shape is None:
            return self._in_one_pass(logits, index, positions)
        columns = self._columns
        greedy_rows = sum(slot in self._greedy for slot in slots) if self._greedy else 0
        batch = SamplingBatch(
            keys=columns.keys[index],
            temperature=columns.temperature[index],
            greedy=columns.greedy[index],
            top_k=columns.top_k[index],
            top_p=columns.top_p[index],
            min_p=columns.min_p[index],
            any_sampled=greedy_rows < len(slots),
            any_greedy=greedy_rows > 0,
            any_truncated=truncated,
            any_tempered=not self._tempered.isdisjoint(slots),
        )
        sampled = sample_tokens(logits, batch, positions, banned, shape)
        self._shaper.note(slots, index, positions, sampled.tokens)
        return sampled

    def _in_one_pass(self, logits: torch.Tensor, index: torch.Tensor, positions: torch.Tensor) -> SampledRows:
        from verl.inference.kernels.sampling import sample_rows

        columns = self._columns
        return sample_rows(logits, index, positions, columns.keys, columns.temperature, columns.greedy)
