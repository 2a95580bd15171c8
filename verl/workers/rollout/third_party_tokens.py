"""Tokens, log-probs and experts that third-party engines report: conversion to `Output`, and a check of log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from verl.inference.sequence import Sequence
from verl.types.request import SamplingParams, split_entries

PROBE_TOP_TOKENS = 20
"""The number of most likely tokens that the check needs."""
PROBE_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
_TEMPERATURES = (1.0, 0.5, 0.05)
_TOP_K = 5
# Relative tolerance of differences of log-probs.
_TOLERANCE = 0.02
# Engines compute log-probs in float32 from logits in their dtype, which are rounded differently in each request: by up
# to this many units in the last place at 1.
_ROUNDING = 16

TopLogProbsFn = Callable[[float, int], Mapping[int, float]]
"""(temperature, top_k or -1) → log-probs of at least the `PROBE_TOP_TOKENS` most likely tokens after `PROBE_PROMPT`."""

LogProbFactors = tuple[float, float, float]
"""Factors by which a reported log-prob is multiplied to get `log_probs`, `raw_log_probs` and `sampled_log_probs`: 1 if
it is equal, 0 if the token was certain, NaN if the value is unknown."""


def accept_reported(
    sequence: Sequence, tokens: Iterable[int], log_probs: Iterable[float], version: int, after_truncation: bool
) -> bool:
    """Append tokens up to the end of the sequence; return whether it has ended.

    `log_probs` are at the request's temperature (greedy: at 1), after penalties, biases and bans. `after_truncation`:
    also after top-k, top-p and min-p.
    """
    return accept_scaled(sequence, tokens, log_probs, version, log_prob_factors(sequence.params, after_truncation))


def log_prob_factors(params: SamplingParams, after_truncation: bool) -> LogProbFactors:
    """The factors for a request: of the policy's log-prob at the temperature, at temperature 1, and under the
    distribution that was sampled from."""
    truncates = params.truncated and after_truncation
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
    engine: str, top_log_probs: TopLogProbsFn, vocab_size: int, after_truncation: bool, dtype: torch.dtype
) -> bool:
    """Raise RuntimeError unless the log-probs that an engine reports are those of the distribution it samples from: at
    the requested temperature, and with top-k after truncation if `after_truncation`, else before.

    `engine`: name and version, for the message. `dtype`: that of the engine's logits. Returns False if the model cannot
    tell, because its next tokens are equally likely or its log-probs are not finite.
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
    if after_truncation:
        _check_normalised(engine, kept, len(kept), f"top_k {_TOP_K}")
    elif any(abs(value - at_one[token]) > _TOLERANCE + noise for token, value in kept.items() if token in at_one):
        _reject(engine, f"top_k {_TOP_K} changes them, although they should be computed before truncation")
    return True


def _most_likely(log_probs: Mapping[int, float]) -> dict[int, float]:
    """The most likely tokens only: engines also report the sampled token, which may be any."""
    return dict(sorted(log_probs.items(), key=lambda item: -item[1])[:PROBE_TOP_TOKENS])


def _check_temperature(
    engine: str, at_one: Mapping[int, float], log_probs: Mapping[int, float], temperature: float, noise: float
) -> None:
    """A log-prob is logit / temperature − a constant: differences grow as 1 / temperature."""
    shared = sorted(at_one.keys() & log_probs.keys(), key=at_one.__getitem__)
    low, high = shared[0], shared[-1]
    expected, reported = (at_one[high] - at_one[low]) / temperature, log_probs[high] - log_probs[low]
    if abs(reported - expected) > _TOLERANCE * max(1.0, expected) + noise / temperature:
        _reject(
            engine,
            f"two tokens {expected:.4f} apart at temperature {temperature} are reported {reported:.4f} apart",
        )


def _check_normalised(engine: str, log_probs: Mapping[int, float], candidates: int, setting: str) -> None:
    """The probabilities of all `candidates` add up to 1; unreported ones are at most the smallest reported."""
    reported = sum(math.exp(value) for value in log_probs.values())
    unreported = (candidates - len(log_probs)) * math.exp(min(log_probs.values()))
    if not 1 - unreported - _TOLERANCE <= reported <= 1 + _TOLERANCE:
        _reject(
            engine,
            f"at {setting} the probabilities of the {len(log_probs)} most likely tokens add up to {reported:.4f}",
        )


def _reject(engine: str, problem: str) -> None:
    raise RuntimeError(
        f"rollout: {engine} does not report the log-probs of the distribution it samples from: {problem}. Importance"
        " ratios would be wrong. Use a tested version (docs/guides/large_models.md), or rollout.name=native."
    )
