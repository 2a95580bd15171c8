"""A token server in a thread: it reports several tokens at a time and caches KV.

The next token depends on every previous token and on the weights that computed its KV: KV that should have been
recomputed, or that was reused from a stale prefix, changes the output.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

from verl.inference.sequence import Sequence
from verl.workers.rollout.third_party import OnChunks, TokenChunk

VOCAB = 50
KV = list[tuple[int, int]]
"""(token, weights that computed its KV), in order."""


class ScriptedServer:
    """Reports `stride` tokens per request every millisecond, until `reported` (total tokens) reaches `hold_at`."""

    def __init__(self, on_chunks: OnChunks, stride: int = 3) -> None:
        self.weights = 0
        self.reported = 0
        self.hold_at = math.inf
        self.start_error = ""
        self.script: list[TokenChunk] = []
        self._on_chunks, self._stride = on_chunks, stride
        self._running: dict[str, tuple[KV, int]] = {}
        self._prefixes: dict[tuple[int, ...], KV] = {}
        self._paused = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> set[str]:
        return set(self._running)

    def start(self, sequences: Iterable[Sequence]) -> None:
        if self.start_error:
            raise ConnectionError(self.start_error)
        with self._changed:
            for sequence in sequences:
                assert sequence.request.id not in self._running
                prompt = tuple(sequence.token_ids)
                kv = self._prefixes.setdefault(prompt, [(token, self.weights) for token in prompt])
                self._running[sequence.request.id] = (list(kv), sequence.max_length)
            self._changed.notify()

    def abort(self, ids: Iterable[str]) -> None:
        with self._changed:
            for name in ids:
                self._running.pop(name, None)

    def pause(self) -> None:
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify()

    def reset_prefix_cache(self) -> None:
        with self._changed:
            assert self._paused or not self._running
            self._prefixes.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def emit(self, *chunks: TokenChunk) -> None:
        """Report these chunks from the server's thread."""
        with self._changed:
            self.script += chunks
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.script or self._may_sample())
                if self._closed:
                    return
                chunks, self.script = self.script, []
                if self._may_sample():
                    chunks += [self._sample(name) for name in list(self._running)]
                self._on_chunks(chunks)
            time.sleep(0.001)

    def _may_sample(self) -> bool:
        return bool(self._running) and not self._paused and self.reported < self.hold_at

    def _sample(self, name: str) -> TokenChunk:
        kv, length = self._running[name]
        tokens = []
        for _ in range(min(self._stride, length - len(kv))):
            tokens.append(next_token(kv))
            kv.append((tokens[-1], self.weights))
        self.reported += len(tokens)
        finished = len(kv) == length
        if finished:
            del self._running[name]
        return TokenChunk(name, tokens, [log_prob(token) for token in tokens], finished)


def next_token(kv: KV) -> int:
    return hash(tuple(kv)) % VOCAB


def log_prob(token: int) -> float:
    return -0.25 * (token + 1)


def expected_tokens(prompt: list[int], versions: list[int], recomputed: bool = True) -> list[int]:
    """The tokens of a response sampled with these weight versions; each version
    recomputes all KV, or keeps it if not `recomputed`."""
    kv = [(token, versions[0]) for token in prompt]
    for version in versions:
        if recomputed:
            kv = [(token, version) for token, _ in kv]
        kv.append((next_token(kv), version))
    return [token for token, _ in kv[len(prompt) :]]
