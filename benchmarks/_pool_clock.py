"""Rollout replicas on a virtual clock: responses of known lengths, decoded at a speed that depends on the load."""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Measured costs of one device: a file of `benchmarks/traces`."""

    decode_ms: tuple[tuple[int, float], ...]
    """(sequences, ms of a decode step), ascending; interpolated and extrapolated linearly, constant below the first."""
    update_tokens_per_s: float
    log_prob_tokens_per_s: float
    weight_sync_s: float
    step_overhead_s: float
    """Seconds of rewards, advantages and the controller per step."""

    @classmethod
    def read(cls, path: Path) -> Costs:
        values: dict[str, Any] = json.loads(path.read_text())
        steps = sorted((int(sequences), float(ms)) for sequences, ms in values.pop("decode_ms").items())
        return cls(tuple(steps), **{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def token_s(self, sequences: int) -> float:
        """Seconds of a decode step with this number of sequences."""
        points = self.decode_ms
        if sequences <= points[0][0]:
            return points[0][1] / 1e3
        at = min(max(1, bisect_left(points, (sequences,))), len(points) - 1)
        (low, below), (high, above) = points[at - 1], points[at]
        return (below + (above - below) * (sequences - low) / (high - low)) / 1e3


class Replica:
    """Sequences that are decoded together: one token per sequence and step; a step takes longer with more sequences."""

    def __init__(self, costs: Costs, slots: int) -> None:
        self._costs, self._slots = costs, slots
        self._steps, self._at = 0.0, 0.0  # decode steps executed until the time `_at`
        self._running: list[tuple[float, int, Any]] = []  # (step at which it ends, serial number, owner)
        self._waiting: deque[tuple[int, Any]] = deque()
        self._number = 0

    @property
    def load(self) -> int:
        """Running and waiting responses."""
        return len(self._running) + len(self._waiting)

    def add(self, tokens: int, owner: Any, now: float) -> None:
        """Add a response of `tokens` tokens."""
        self._advance(now)
        self._waiting.append((tokens, owner))
        self._start()

    def pause(self, now: float, seconds: float) -> None:
        """Decode nothing for `seconds`."""
        self._advance(now)
        self._at = now + seconds

    def next_end(self) -> float:
        """Time at which the next response finishes if none is added; infinite if there is none."""
        if not self._running:
            return float("inf")
        return self._at + (self._running[0][0] - self._steps) * self._costs.token_s(len(self._running))

    def finish(self) -> tuple[float, Any]:
        """Advance to the end of the next response; return this time and its owner."""
        now = self.next_end()
        ends, _, owner = heapq.heappop(self._running)
        self._steps, self._at = ends, now
        self._start()
        return now, owner

    def _advance(self, now: float) -> None:
        if now > self._at:
            if self._running:
                self._steps += (now - self._at) / self._costs.token_s(len(self._running))
            self._at = now

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            tokens, owner = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._steps + tokens, self._number, owner))


class Pool:
    """Replicas; a response goes to the one with the lowest load."""

    def __init__(self, costs: Costs, replicas: int, slots: int) -> None:
        self._replicas = [Replica(costs, slots) for _ in range(replicas)]
        self._ends: list[tuple[float, int]] = []
        self.load = 0
        """Running and waiting responses of all replicas."""

    def add(self, responses: list[tuple[int, Any]], now: float) -> None:
        """Add responses (tokens, owner)."""
        loads = [(replica.load, index) for index, replica in enumerate(self._replicas)]
        heapq.heapify(loads)
        self.load += len(responses)
        for tokens, owner in responses:
            load, index = loads[0]
            self._replicas[index].add(tokens, owner, now)
            heapq.heapreplace(loads, (load + 1, index))
        self._update_ends()

    def pause(self, now: float, seconds: float) -> None:
        for replica in self._replicas:
            replica.pause(now, seconds)
        self._update_ends()

    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else float("inf")

    def finish(self) -> tuple[float, Any]:
        """Like `Replica.finish`, for the response that finishes first."""
        _, index = self._ends[0]
        self.load -= 1
        finished = self._replicas[index].finish()
        heapq.heapreplace(self._ends, (self._replicas[index].next_end(), index))
        return finished

    def _update_ends(self) -> None:
        self._ends = [(replica.next_end(), index) for index, replica in enumerate(self._replicas)]
        heapq.heapify(self._ends)
