"""Runs a model on a paged KV cache step by step: the test decides which tokens of which sequence each step computes."""

from __future__ import annotations

import random
from typing import Any

import torch

from verl.inference.attention import AttentionStep, TorchAttention


class PagedDriver:
    """Sequences in shuffled blocks of a cache filled with NaN; `logits` collects the logits of every token."""

    def __init__(self, model: Any, texts: list[list[int]], block_size: int = 4, backend: Any = None) -> None:
        self.model, self.texts, self.block_size = model, texts, block_size
        self.backend = backend or TorchAttention()
        needed = sum(-(-len(text) // block_size) for text in texts)
        shape = (needed + 3, block_size, model.num_kv_heads, model.head_dim)
        make = lambda: torch.full(shape, torch.nan, dtype=model.dtype, device=model.device)  # noqa: E731
        self.cache = [(make(), make()) for _ in range(model.num_layers)]
        self.free = random.Random(0).sample(range(needed + 3), needed + 3)
        self.tables: list[list[int]] = [[] for _ in texts]
        self.done = [0] * len(texts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def share(self, source: int, target: int, blocks: int) -> None:
        """Share the first blocks of `source` with `target`, where they count as computed."""
        self.tables[target] = self.tables[source][:blocks]
        self.done[target] = blocks * self.block_size
        self.logits[target] = self.logits[source][: self.done[target]]

    @torch.inference_mode()
    def run(self, prefills: dict[int, int], decodes: tuple[int, ...] = ()) -> None:
        """One step: the next `prefills[i]` tokens of sequence i, and one token of each sequence in `decodes`."""
        parts = [*prefills.items(), *((i, 1) for i in decodes)]
        ids, positions, slots = [], [], []
        for i, count in parts:
            span = range(self.done[i], self.done[i] + count)
            while len(self.tables[i]) * self.block_size < span.stop:
                self.tables[i].append(self.free.pop())
            ids += self.texts[i][span.start : span.stop]
            positions += span
            slots += [self.tables[i][p // self.block_size] * self.block_size + p % self.block_size for p in span]
            self.done[i] = span.stop
        device = self.model.device
        int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
        starts = [0]
        for count in prefills.values():
            starts.append(starts[-1] + count)
        step = AttentionStep(
            kv_cache=self.cache,
            backend=self.backend,
            slots=torch.tensor(slots, device=device),
            num_prefill_tokens=starts[-1],
            query_starts=int32(starts),
            prefill_lengths=int32([self.done[i] for i in prefills]),
            prefill_tables=self._tables(list(prefills)),
            decode_lengths=int32([self.done[i] for i in decodes]),
            decode_tables=self._tables(list(decodes)),
        )
        hidden = self.model.hidden(torch.tensor(ids, device=device), torch.tensor(positions, device=device), step)
        rows = iter(self.model.logits(hidden).float())
        for i, count in parts:
            self.logits[i] += [next(rows) for _ in range(count)]

    def _tables(self, sequences: list[int]) -> torch.Tensor:
        width = max(len(table) for table in self.tables)
        rows = [self.tables[i] + [0] * (width - len(self.tables[i])) for i in sequences]
        return torch.tensor(rows, dtype=torch.int32, device=self.model.device).view(len(sequences), width)

    def worst_difference(self, expected: list[torch.Tensor]) -> float:
        """Largest difference of log-probs from `expected`, [tokens, vocab] per sequence, over all computed tokens."""
        return max(
            float((torch.stack(rows).log_softmax(-1) - reference[: len(rows)].log_softmax(-1)).abs().max())
            for rows, reference in zip(self.logits, expected, strict=True)
        )
