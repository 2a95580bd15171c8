"""LogitShaper: what penalties and biases do to the logits of the few slots that ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from verl.inference.token_sampling import Shape
from verl.types.request import SamplingParams
from verl.utils.device_copy import copied_together

__all__ = ["LogitShaper"]


class LogitShaper:
    """Remembers the tokens of penalised slots on the device. Nothing is held or done until the first slot asks."""

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        self._shape = (slots, max_model_len)
        self._device = device
        # How many tokens each has: known here, so that asking for the longest costs no look at the device.
        self._penalised: dict[int, int] = {}
        # Tokens and what is added to each.
        self._biases: dict[int, list[torch.Tensor]] = {}
        self._tokens = torch.empty(0)

    def assign(
        self, taken: Iterable[tuple[int, SamplingParams]], histories: Iterable[tuple[int, int, list[int]]]
    ) -> None:
        """These slots belong to new sequences. `histories`: (slot, length of the prompt, tokens) of penalised ones."""
        strengths = {}
        for slot, params in taken:
            self._penalised.pop(slot, None)
            self._biases.pop(slot, None)
            if params.logit_bias:
                ids, values = zip(*params.logit_bias, strict=True)
                bias = [torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)]
                self._biases[slot] = copied_together(bias, self._device)
            if params.penalised:
                strengths[slot] = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        for slot, prompt_length, token_ids in histories:
            if not len(self._tokens):
                self._tokens = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
                self._prompts = torch.zeros(self._shape[0], 1, dtype=torch.int64, device=self._device)
                self._strengths = torch.zeros(self._shape[0], 3, dtype=torch.float32, device=self._device)
            self._penalised[slot] = len(token_ids)
            self._tokens[slot, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32).to(self._device)
            self._prompts[slot] = prompt_length
            self._strengths[slot] = torch.tensor(strengths[slot]).to(self._device)

    def shape(self, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor) -> Shape | None:
        """How the logits of these rows are changed; None: not at all. `index` and `positions` [rows] are on the device:
        slots, and where each new token will stand."""
        if not self._penalised and not self._biases:
            return None
        if self._penalised.keys().isdisjoint(slots) and self._biases.keys().isdisjoint(slots):
            return None
        return partial(self._shaped, slots=slots, index=index, positions=positions)

    def note(self, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """These tokens [rows] were drawn."""
        if not self._penalised:
            return
        grown = {slot: self._penalised[slot] + 1 for slot in slots if slot in self._penalised}
        if grown:
            self._penalised.update(grown)
            # Slots that are not penalised have a row too, which nobody reads.
            self._tokens[index, positions] = tokens.int()

    def _shaped(
        self, logits: torch.Tensor, block: slice, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """`logits` [rows of the block, vocab] float32 → new ones."""
        logits = logits.clone()
        here = slots[block]
        penalised = [row for row, slot in enumerate(here) if slot in self._penalised]
        if penalised:
            (rows,) = copied_together([torch.tensor(penalised, dtype=torch.int64)], self._device)
            longest = max(self._penalised[here[row]] for row in penalised)
            tokens = self._tokens[:, :longest][index[block][rows]]
            logits[rows] = self._penalties(logits[rows], tokens, index[block][rows], positions[block][rows])
        for row, slot in enumerate(here):
            if slot in self._biases:
                logits[row].index_add_(0, *self._biases[slot])
        return logits

    def _penalties(
        self, logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """`logits` [rows, vocab], of `tokens` [rows, longest] the first `lengths` [rows] count → [rows, vocab]."""
        tokens, place = tokens.long(), torch.arange(tokens.shape[1], device=self._device)
        there = place < lengths.unsqueeze(1)
        said = torch.zeros_like(logits).scatter_add_(1, tokens, (there & (place >= self._prompts[slots])).float())
        known = torch.zeros_like(logits).scatter_add_(1, tokens, there.float()) > 0
        repetition, frequency, presence = self._strengths[slots].unsqueeze(-1).unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(known, repeated, logits) - frequency * said - presence * (said > 0)
