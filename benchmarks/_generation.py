"""Workloads of generation and their physical floors: what every engine is given, and what none can go below."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from _shapes import copy_bandwidth, matmul_rate

__all__ = ["Case", "Floors", "cases_for", "dtype_of"]


@dataclass(frozen=True)
class Case:
    """Requests that are submitted at once. `n` in a row share a prompt; lengths are forced, whatever is sampled."""

    what: str
    lengths: tuple[int, ...]
    prompt: int
    n: int = 1
    log_probs: bool = False
    """The engine reports a log-prob of every sampled token (native always does)."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_even(self) -> bool:
        """All are decoded from the first step to the last, so seconds per step mean something."""
        return len(set(self.lengths)) == 1

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a sequence that is decoded, over all decode steps."""
        return self.prompt + sum(length * length for length in self.lengths) / (2 * self.tokens)

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """One for each `n` requests; other cases and seeds have others, so that no cache knows them."""
        draw = random.Random(f"{self.what}, {self.tokens} tokens, {seed}")
        return [[draw.randrange(vocab) for _ in range(self.prompt)] for _ in range(len(self.lengths) // self.n)]

    def prefill_only(self) -> Case:
        return replace(self, lengths=(1,) * len(self.lengths))

    def warm_up(self) -> Case:
        """What compiles all kernels and records all graphs that it needs: of ragged lengths those of every size."""
        return replace(self, lengths=(min(40, self.lengths[0]),) * len(self.lengths)) if self.is_even else self


def cases_for(device: str, quick: bool) -> list[Case]:
    if device == "cpu":
        draw = random.Random(3)
        count, prompt, longest = (16, 16, 32) if quick else (64, 32, 128)
        # Ragged 8:1: lengths spread evenly, on a log scale, from an eighth of the longest to the longest.
        ragged = tuple(round(longest / 8 ** draw.random()) for _ in range(count))
        even = (longest,) * (count // 4)
        return [Case(f"{count} ragged 8:1", ragged, prompt), Case(f"{count // 4} in groups of 4", even, prompt, n=4)]
    fixed = [Case(f"{count} x 128+256", (256,) * count, 128) for count in (256, 512, 1024)]
    logged = Case("512 x 128+256, log-probs", (256,) * 512, 128, log_probs=True)
    if quick:
        return [*fixed[:2], logged]
    groups = Case("64 prompts x 8, 128+256", (256,) * 512, 128, n=8, log_probs=True)
    draw = random.Random(1)
    ragged = tuple(max(8, min(2048, round(draw.expovariate(1 / 256)))) for _ in range(1024))
    return [*fixed, logged, groups, Case("1024 ragged (mean 256, at most 2048)", ragged, 128, log_probs=True)]


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


class Floors:
    """What a model's decode step takes at least on this device, by what is read and by what is multiplied."""

    def __init__(self, config: Any, device: str) -> None:
        from transformers import AutoModelForCausalLM

        itemsize = dtype_of(device).itemsize
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Of an embedding that is not the head as well, only the rows of the step's tokens are read.
        looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        self.multiplied = parameters - looked_up
        self.weight_bytes = self.multiplied * itemsize
        head = config.hidden_size // config.num_attention_heads
        self.kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head * itemsize
        self.bandwidth = copy_bandwidth(device)
        self.rate = matmul_rate(device)

    def read_ms(self, sequences: int, context: float) -> float:
        """Weights and KV read once."""
        return (self.weight_bytes + sequences * context * self.kv_bytes) / self.bandwidth * 1e3

    def least_ms(self, sequences: int, context: float) -> float:
        """Weights read or multiplied, whichever takes longer, and the KV read."""
        weights = self.read_ms(sequences, 0)
        return max(weights, self.multiply_ms(sequences)) + self.read_ms(sequences, context) - weights

    def multiply_ms(self, sequences: int) -> float:
        """The products with the weights at the rate of a large one."""
        return 2 * self.multiplied * sequences / self.rate * 1e3
