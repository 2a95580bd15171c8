"""A scripted model on the real engine: scheduler, blocks, prefix cache and thread.

The script receives the tokens that the runner reads through the block tables, as a model would.
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
"""Maps the tokens so far to the next token."""
_BLOCKS, _BLOCK_SIZE, _SEQUENCES, _STEP_TOKENS = 1024, 16, 32, 512


class ScriptRunner(HashRunner):
    """The KV entry of a token is the token itself."""

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
    """The log-prob of the token at this position; neighbours differ."""
    return -(position % 997 + 1) / 1000


def scripted_engine(script: Script, max_model_len: int = 4096, tokenizer: Any = None) -> AsyncEngine:
    """An engine that runs the script; the caller closes it. Requests with stop strings need the `tokenizer`."""
    scheduler = Scheduler(BlockManager(_BLOCKS, _BLOCK_SIZE), _SEQUENCES, _STEP_TOKENS, max_model_len)
    return AsyncEngine(Engine(scheduler, ScriptRunner(script)), lambda: tokenizer)


def scripted_turns(turns: Sequence[Sequence[int]], prompt: Sequence[int], end: int) -> Script:
    """A script with one turn after each occurrence of the generation prompt `prompt`; then only `end`."""
    start = list(prompt)

    def next_token(tokens: Sequence[int]) -> int:
        prompts = [index for index in range(len(tokens)) if list(tokens[index : index + len(start)]) == start]
        position = len(tokens) - prompts[-1] - len(start)
        turn = [*turns[len(prompts) - 1], end] if len(prompts) <= len(turns) else [end]
        return turn[position] if position < len(turn) else end

    return next_token
