"""A model that says what a script says, played by the real engine: scheduler, blocks, prefix cache and thread.

The script is asked after the tokens that the runner reads through the block tables, as a model would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support.hash_runner import HashRunner
from verl.inference.async_engine import AsyncEngine
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.scheduler import Scheduler

Script = Callable[[Sequence[int]], int]
"""The next token after these."""
_BLOCKS, _BLOCK_SIZE, _SEQUENCES, _STEP_TOKENS = 1024, 16, 32, 512


class ScriptRunner(HashRunner):
    """The KV of a token is the token."""

    def __init__(self, script: Script) -> None:
        super().__init__(_BLOCKS, _BLOCK_SIZE, _SEQUENCES, _STEP_TOKENS)
        self._script = script

    def _feed(self, slot: int, position: int, token: int) -> Any:
        table = self._tables[slot]
        self._kv[table[position // self._size]][position % self._size] = token
        return [self._kv[table[place // self._size]][place % self._size] for place in range(position + 1)]

    def _sampled(self, state: Any, slot: int, position: int, banned: set[int]) -> tuple[int, float, float, float]:
        assert len(state) == position
        return self._script(state), log_prob(position), 0.0, log_prob(position)


def log_prob(position: int) -> float:
    """Of a token that stands there: no two neighbours have the same."""
    return -(position % 997 + 1) / 1000


def scripted_engine(script: Script, max_model_len: int = 4096, tokenizer: Any = None) -> AsyncEngine:
    """Close it at the end. Requests with stop strings need the `tokenizer`."""
    scheduler = Scheduler(BlockManager(_BLOCKS, _BLOCK_SIZE), _SEQUENCES, _STEP_TOKENS, max_model_len)
    return AsyncEngine(Engine(scheduler, ScriptRunner(script)), lambda: tokenizer)


def answers(turns: Sequence[Sequence[int]], prompt: Sequence[int], end: int) -> Script:
    """What is said after each occurrence of the generation prompt, one after the other; then only `end`."""
    start = list(prompt)

    def speak(seen: Sequence[int]) -> int:
        places = [place for place in range(len(seen)) if list(seen[place : place + len(start)]) == start]
        said = len(seen) - places[-1] - len(start)
        turn = [*turns[len(places) - 1], end] if len(places) <= len(turns) else [end]
        return turn[said] if said < len(turn) else end

    return speak
