"""HFEngine: the steps of an HFRunner, as the engine's thread drives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from verl.inference.sequence import Sequence, accept_tokens
from verl.types.request import Request, check_request
from verl.utils.progress import pulse
from verl.workers.rollout.hf_runner import HFRunner

__all__ = ["HFEngine"]


class HFEngine:
    """At most `max_sequences` at a time, first come first served; whoever joins is computed before the others go on."""

    def __init__(self, runner: HFRunner, max_sequences: int, max_length: int) -> None:
        self.version = 0
        self._runner = runner
        self._max_sequences = max_sequences
        self._max_length = max_length
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def check(self, request: Request) -> None:
        check_request(request, self._max_length)
        asked = request.params
        if asked.penalised or asked.logit_bias or asked.top_log_probs or asked.prompt_log_probs:
            raise ValueError(
                f"request {request.id!r}: penalties, logit_bias, top_log_probs and prompt_log_probs are not for this"
                " engine. Leave them out, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        gone = set(sequences)
        for sequence in gone:
            sequence.done = True
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in gone)
        self._drop(gone)

    def step(self) -> list[Sequence]:
        """One token for those that join, or else for all that run."""
        pulse()
        free = self._max_sequences - len(self._running)
        joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._running += joining
        sampled = self._runner.prefill(joining) if joining else self._runner.decode()
        rows, tokens, log_probs, raw, drawn = (list(column) for column in zip(*sampled, strict=True))
        for sequence in rows:
            sequence.in_flight += 1
        failed = accept_tokens(rows, tokens, log_probs, raw, drawn, self.version)
        finished = [sequence for sequence in rows if sequence in failed or sequence.is_finished()]
        self._drop(set(finished))
        return finished

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def in_flight(self) -> bool:
        """Never: a step returns its tokens."""
        return False

    def drain(self) -> list[Sequence]:
        return []

    def requeue_all(self) -> None:
        """Drop all KV; what ran goes back to the head of the queue."""
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._runner.clear()

    def forget_prefixes(self) -> None:
        """There are none: only what joins together shares a prompt."""

    def clear(self) -> None:
        self._waiting.clear()
        self._running = []
        self._runner.clear()

    def _drop(self, leaving: set[Sequence]) -> None:
        here = [sequence for sequence in self._running if sequence in leaving]
        if here:
            self._runner.leave(here)
            self._running = [sequence for sequence in self._running if sequence not in leaving]
