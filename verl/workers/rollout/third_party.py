"""Adapters for third-party engines.

- `ServerStepEngine`: the `StepEngine` interface of an engine that samples on its own (a `TokenServer`).
- `accept_reported`, `accept_scaled`, `accept_reported_experts`: store what an engine reports in `Output`.
- `check_reported_log_probs`: whether reported log-probs are those of the sampled distribution.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import torch

from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams, TopLogProbs, check_request, split_entries
from verl.utils.progress import pulse

# Maximum wait for chunks in one step. It is short because requests that are added meanwhile wait for its end.
_WAIT_S = 0.005

PROBE_TOP_TOKENS = 20
"""Number of most likely tokens that `check_reported_log_probs` reads."""
PROBE_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
_TEMPERATURES = (1.0, 0.5, 0.05)
_TOP_K = 5
# Tolerance of differences of log-probs (relative if they are above 1) and of sums of probabilities.
_TOLERANCE = 0.02
# Engines compute log-probs in float32 from logits in their dtype, which are rounded differently in each request: by up
# to this many units in the last place at 1.
_ROUNDING = 16

TopLogProbsFn = Callable[[float, int], Mapping[int, float]]
"""(temperature, top_k or -1) → log-probs of at least the `PROBE_TOP_TOKENS` most likely tokens after `PROBE_PROMPT`."""

LogProbFactors = tuple[float, float, float]
"""Factors by which a reported log-prob is multiplied to get `log_probs`, `raw_log_probs` and `sampled_log_probs`: 1 if
it is equal, 0 if the token was certain (greedy), NaN if the engine does not report the value."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one request."""

    id: str
    """Id of the request."""
    token_ids: list[int]
    log_probs: list[float]
    """As the engine reports them: see `accept_reported`."""
    finished: bool
    """Whether this is the last chunk of the request."""
    error: str | Exception | None = None
    """Reason why the request failed."""
    details: ChunkDetails | None = None


@dataclass(frozen=True, slots=True)
class ChunkDetails:
    """Optional parts of a chunk."""

    cached_tokens: int = 0
    """In the first chunk: number of prompt tokens whose KV was in the prefix cache."""
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    """As in `Output`, if requested: one entry per token of the chunk."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """In the first chunk, if requested."""
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)


OnChunks = Callable[[SequenceOf[TokenChunk]], None]
"""Callback that receives new chunks."""


class TokenServer(Protocol):
    """An engine that samples on its own and reports chunks to a callback, from any thread. All methods are
    thread-safe."""

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Start sampling after `sequence.token_ids` (prompt and generated tokens), up to `sequence.max_length`."""

    def abort(self, ids: Iterable[str]) -> None:
        """Abort requests: none of their chunks is reported afterwards. Never raises, even if the server has ended."""

    def pause(self) -> None:
        """Stop sampling; return when all sampled tokens have been reported."""

    def resume(self) -> None:
        """Resume sampling."""

    def reset_prefix_cache(self) -> None:
        """Requests that are started later must not reuse earlier KV. Called while paused or without requests."""

    def close(self) -> None:
        """Shut down; nothing is reported any more."""


class ServerStepEngine:
    """A `StepEngine` whose step accepts the chunks that a server has reported since the last step."""

    def __init__(
        self,
        connect: Callable[[OnChunks], TokenServer],
        max_length: int,
        log_probs_after_filtering: bool,
        reports_details: bool = False,
    ) -> None:
        """`connect(on_chunks)` returns the server, which reports to `on_chunks`. `log_probs_after_filtering`: see
        `accept_reported`. `reports_details`: the server reports top and prompt log-probs, at the request's
        temperature."""
        self.version = 0
        self._max_length = max_length
        self._log_probs_after_filtering = log_probs_after_filtering
        self._reports_details = reports_details
        self._chunks: list[TokenChunk] = []
        """Reported chunks that no step has accepted yet."""
        self._chunk_reported = threading.Condition()
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._paused = False
        self._server = connect(self._on_chunks)

    # ---------------------------------------------------------------- requests

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that this engine cannot execute."""
        check_request(request, self._max_length)
        params = request.params
        if (params.top_log_probs or params.prompt_log_probs) and not self._reports_details:
            raise ValueError(
                f"request {request.id!r}: this engine does not support top_log_probs and prompt_log_probs. Leave them"
                " out, or use rollout.name=native."
            )
        if params.top_log_probs and params.temperature not in (0, 1):
            raise ValueError(
                f"request {request.id!r}: top_log_probs are at temperature 1, but this engine reports them at the"
                f" sampling temperature {params.temperature}. Set temperature to 0 or 1, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        removed = set(sequences)
        for sequence in removed:
            sequence.done = True
        self._waiting = [sequence for sequence in self._waiting if sequence not in removed]
        self._stop([request_id for request_id, sequence in self._running.items() if sequence in removed])

    # ---------------------------------------------------------------- steps

    def step(self) -> list[Sequence]:
        """Start waiting sequences, accept the chunks reported within `_WAIT_S`, and return the finished sequences."""
        if self._paused:
            self._server.resume()
            self._paused = False
        if self._waiting:
            starting, self._waiting = self._waiting, []
            self._running.update({sequence.request.id: sequence for sequence in starting})
            self._server.start(starting)
        with self._chunk_reported:
            self._chunk_reported.wait_for(lambda: self._chunks, timeout=_WAIT_S)
        return self._take_chunks()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def in_flight(self) -> bool:
        """Whether the server is sampling."""
        return bool(self._running) and not self._paused

    def drain(self) -> list[Sequence]:
        """Pause sampling until the next step; return the sequences that have finished."""
        if self.in_flight:
            self._paused = True  # before the call: if it fails half-way, the next step must resume
            self._server.pause()
        return self._take_chunks()

    def preempt_all(self) -> None:
        """Stop running sequences and start them again in the next step, without their KV and before waiting ones."""
        running = list(self._running.values())
        self._stop(list(self._running))
        self._waiting = running + self._waiting
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        self._server.reset_prefix_cache()

    def clear(self) -> None:
        self._waiting = []
        self._stop(list(self._running))

    def close(self) -> None:
        """Shut down the server. Called after the thread that drives the steps has ended."""
        self._server.close()

    # ---------------------------------------------------------------- chunks

    def _on_chunks(self, chunks: SequenceOf[TokenChunk]) -> None:
        with self._chunk_reported:
            self._chunks += chunks
            self._chunk_reported.notify()

    def _take_chunks(self) -> list[Sequence]:
        """Accept reported chunks; return the sequences that they finish."""
        with self._chunk_reported:
            chunks, self._chunks = self._chunks, []
        if chunks:  # otherwise the server may hang: waiting for it is not progress
            pulse()
        finished: list[Sequence] = []
        # Ended here (stop strings, end tokens, errors), but not yet at the server.
        unfinished_at_server: list[str] = []
        for chunk in chunks:
            sequence = self._running.get(chunk.id)
            if sequence is None:
                continue
            if self._accept(sequence, chunk):
                finished.append(sequence)
                if chunk.finished:
                    del self._running[chunk.id]
                else:
                    unfinished_at_server.append(chunk.id)
        self._stop(unfinished_at_server)
        return finished

    def _accept(self, sequence: Sequence, chunk: TokenChunk) -> bool:
        """Append a chunk; return whether it has finished the sequence or reports that it failed."""
        if sequence.done:
            return False
        count_before = len(sequence.output.token_ids)
        ended = accept_reported(
            sequence, chunk.token_ids, chunk.log_probs, self.version, self._log_probs_after_filtering
        )
        if chunk.details is not None:
            _accept_details(sequence, chunk.details, count_before)
        if ended:
            return True
        error = chunk.error
        if chunk.finished and error is None:
            error = (
                f"the engine ended it after {len(sequence)} of at most {sequence.max_length} tokens, without an end"
                " token. Check the engine's own length limit, and whether another client aborts requests."
            )
        if error is None:
            return False
        sequence.done = True
        message = f"rollout: request {chunk.id!r}: {error}"
        sequence.error = error if isinstance(error, Exception) else RuntimeError(message)
        return True

    def _stop(self, ids: list[str]) -> None:
        """Abort requests at the server and discard their chunks."""
        if not ids:
            return
        self._server.abort(ids)
        for request_id in ids:
            del self._running[request_id]
        with self._chunk_reported:
            self._chunks = [chunk for chunk in self._chunks if chunk.id in self._running]


def _accept_details(sequence: Sequence, details: ChunkDetails, count_before: int) -> None:
    """Store the details of a chunk. `count_before`: number of generated tokens before it."""
    output = sequence.output
    output.top_log_probs += details.top_log_probs[: len(output.token_ids) - count_before]
    if count_before == 0:
        output.cached_tokens = details.cached_tokens
    if not output.prompt_log_probs:
        last = len(sequence.prompt_ids) - 1
        output.prompt_log_probs = details.prompt_log_probs[:last]
        output.prompt_top_log_probs = details.prompt_top_log_probs[:last]


# ---------------------------------------------------------------- reported tokens


def accept_reported(
    sequence: Sequence, tokens: Iterable[int], log_probs: Iterable[float], version: int, log_probs_after_filtering: bool
) -> bool:
    """Append tokens up to the end of the sequence; return whether it has ended.

    `log_probs` are at the request's temperature (greedy: at 1), after penalties, biases and bans.
    `log_probs_after_filtering`: whether they are also after top-k, top-p and min-p.
    """
    return accept_scaled(
        sequence, tokens, log_probs, version, log_prob_factors(sequence.params, log_probs_after_filtering)
    )


def log_prob_factors(params: SamplingParams, log_probs_after_filtering: bool) -> LogProbFactors:
    """Return the factors for a request. `log_probs_after_filtering`: see `accept_reported`."""
    truncates = params.truncated and log_probs_after_filtering
    policy = math.nan if params.penalised or params.logit_bias or truncates else 1.0
    raw = policy if params.greedy or params.temperature == 1 else math.nan
    sampled = 1.0 if truncates or not params.truncated else math.nan
    return policy, raw, 0.0 if params.greedy else sampled


def accept_scaled(
    sequence: Sequence, tokens: Iterable[int], log_probs: Iterable[float], version: int, factors: LogProbFactors
) -> bool:
    """`accept_reported` with `log_prob_factors` that were computed once per request."""
    output, (policy, raw, sampled) = sequence.output, factors
    for token, reported in zip(tokens, log_probs, strict=True):
        if not math.isfinite(reported):
            raise FloatingPointError(
                f"rollout: weights of version {version} give log-prob {reported} to token {token} of request"
                f" {sequence.request.id!r}. The weights hold NaN or inf, or overflow in rollout.dtype."
            )
        banned = len(output.token_ids) < sequence.params.min_new_tokens  # end tokens are banned
        sequence.token_ids.append(token)
        output.token_ids.append(token)
        output.log_probs.append(math.nan if banned else reported * policy)
        output.raw_log_probs.append(math.nan if banned else reported * raw)
        output.sampled_log_probs.append(reported * sampled)
        output.versions.append(version)
        if sequence.is_finished():
            sequence.done = True
            return True
    return False


def accept_reported_experts(sequence: Sequence, experts: np.ndarray, version: int) -> None:
    """Store the experts [prompt and response tokens, layers, k] that an engine reports when a request ends.

    After a weight update the engine has recomputed earlier tokens, so its experts are only used for tokens that the
    current `version` sampled. The others keep the experts known from `resume_from`, or stay unknown.
    """
    reported = split_entries(experts, len(sequence.prompt_ids), len(sequence.output.token_ids))
    earlier = [*sequence.experts, *([None] * (len(reported) - len(sequence.experts)))]
    sequence.experts = [
        new if sampled_by == version else old
        for old, new, sampled_by in zip(earlier, reported, sequence.output.versions, strict=True)
    ]
    sequence.output.routed_experts = sequence.experts_since(0)


# ---------------------------------------------------------------- check of the reported log-probs


def check_reported_log_probs(
    engine: str, top_log_probs: TopLogProbsFn, vocab_size: int, log_probs_after_filtering: bool, dtype: torch.dtype
) -> bool:
    """Raise RuntimeError unless an engine reports log-probs at the requested temperature that, with top-k, are
    normalised over the kept tokens if `log_probs_after_filtering`, else over all tokens.

    `engine`: name and version, for the message. `dtype`: that of the engine's logits. Returns False if the check is not
    possible with the current weights: the most likely tokens are equally likely, or log-probs are not finite.
    """
    noise = _ROUNDING * torch.finfo(dtype).eps
    by_temperature = {temperature: _most_likely(top_log_probs(temperature, -1)) for temperature in _TEMPERATURES}
    at_one = by_temperature[1.0]
    spread = max(at_one.values()) - min(at_one.values())
    if not all(math.isfinite(value) for value in at_one.values()) or spread < 0.01 + noise:
        return False
    for temperature, log_probs in by_temperature.items():
        _check_temperature(engine, at_one, log_probs, temperature, noise)
        _check_normalised(engine, log_probs, vocab_size, f"temperature {temperature}")
    kept = {token: value for token, value in _most_likely(top_log_probs(1.0, _TOP_K)).items() if value > -1e4}
    if log_probs_after_filtering:
        _check_normalised(engine, kept, len(kept), f"top_k {_TOP_K}")
    elif any(abs(value - at_one[token]) > _TOLERANCE + noise for token, value in kept.items() if token in at_one):
        _reject(engine, f"top_k {_TOP_K} changes them, although they should be computed before filtering")
    return True


def _most_likely(log_probs: Mapping[int, float]) -> dict[int, float]:
    """Return the most likely tokens only: engines also report the sampled token, which may be an unlikely one."""
    return dict(sorted(log_probs.items(), key=lambda item: -item[1])[:PROBE_TOP_TOKENS])


def _check_temperature(
    engine: str, at_one: Mapping[int, float], log_probs: Mapping[int, float], temperature: float, noise: float
) -> None:
    """Reject log-probs whose differences are not proportional to 1 / temperature.

    A log-prob is logit / temperature − a constant.
    """
    shared = sorted(at_one.keys() & log_probs.keys(), key=at_one.__getitem__)
    if not shared:
        _reject(engine, f"temperature {temperature} changes which tokens are the most likely")
    low, high = shared[0], shared[-1]
    expected, reported = (at_one[high] - at_one[low]) / temperature, log_probs[high] - log_probs[low]
    if abs(reported - expected) > _TOLERANCE * max(1.0, expected) + noise / temperature:
        _reject(
            engine,
            f"the log-probs of two tokens should differ by {expected:.4f} at temperature {temperature}, but differ by"
            f" {reported:.4f}",
        )


def _check_normalised(engine: str, log_probs: Mapping[int, float], candidates: int, setting: str) -> None:
    """Reject log-probs if the probabilities of all `candidates` cannot add up to 1.

    Probabilities that are not reported are at most as large as the smallest reported one.
    """
    reported = sum(math.exp(value) for value in log_probs.values())
    unreported = (candidates - len(log_probs)) * math.exp(min(log_probs.values()))
    if not 1 - unreported - _TOLERANCE <= reported <= 1 + _TOLERANCE:
        _reject(
            engine,
            f"at {setting} the probabilities of the {len(log_probs)} most likely tokens add up to {reported:.4f}",
        )


def _reject(engine: str, problem: str) -> NoReturn:
    raise RuntimeError(
        f"rollout: {engine} does not report the log-probs of the distribution it samples from: {problem}. Importance"
        " ratios would be wrong. Use a tested version (docs/guides/large_models.md), or rollout.name=native."
    )
