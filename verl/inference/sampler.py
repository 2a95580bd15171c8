"""Sampler: the next token of chosen slots, whose parameters, penalties and biases lie on the device from the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from verl.inference.step_plan import Masks
from verl.inference.token_sampling import SampledRows, SamplingBatch, Shape, sample_tokens
from verl.types.request import SamplingParams
from verl.utils.device import copy_to_device

__all__ = ["Sampler"]


class Sampler:
    """Parameters of `slots` slots as columns on the device; a step gathers the rows it samples."""

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._shaper = _LogitShaper(slots, max_model_len, device)
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
        (index,) = copy_to_device([torch.tensor([slot for slot, _ in taken], dtype=torch.int64)], self._device)
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
        masks: Masks | None = None,
    ) -> SampledRows:
        """One token per row of `logits` [rows, vocab]; row i belongs to slot slots[i], which is index[i] on the device.

        `positions` [rows] int64: where each token will stand in its sequence. `banned` and `masks` as in StepPlan.
        """
        truncated = not self._truncated.isdisjoint(slots)
        shape = self._shaper.shape(slots, index, positions)
        if masks is not None:
            shape = _masked(shape, masks, self._device)
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


def _masked(shape: Shape | None, masks: Masks, device: torch.device) -> Shape:
    """After `shape`, the tokens that a row's mask does not allow have no chance; nor have those it does not know."""
    rows, words = masks
    packed = torch.from_numpy(words).view(torch.uint8)
    packed, bit = copy_to_device([packed, torch.arange(8, dtype=torch.uint8)], device)

    def apply(logits: torch.Tensor, block: slice) -> torch.Tensor:
        logits = logits.clone() if shape is None else shape(logits, block)
        here = [(number, row - block.start) for number, row in enumerate(rows) if block.start <= row < block.stop]
        if here:
            (cells,) = copy_to_device([torch.tensor(here, dtype=torch.int64)], device)
            bits = (packed[cells[:, 0]].unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits.shape[-1]].bool()
            allowed = torch.zeros(len(here), logits.shape[-1], dtype=torch.bool, device=device)
            allowed[:, : bits.shape[-1]] = bits
            logits[cells[:, 1]] = logits[cells[:, 1]].masked_fill(~allowed, -torch.inf)
        return logits

    return apply


class _LogitShaper:
    """Penalties and biases: remembers penalised slots' tokens on the device, and nothing until the first slot asks."""

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
                self._biases[slot] = copy_to_device(bias, self._device)
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
            (rows,) = copy_to_device([torch.tensor(penalised, dtype=torch.int64)], self._device)
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
