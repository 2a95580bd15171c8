"""What an engine of other make says of a token, as the columns of an `Output`: what it does not say is NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable

from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams, check_request

__all__ = ["accept_reported", "check_reported"]


def check_reported(request: Request, max_length: int) -> None:
    """Raise ValueError for a request that can never be answered, or asks for what such an engine does not report."""
    check_request(request, max_length)
    if request.params.top_log_probs or request.params.prompt_log_probs:
        raise ValueError(
            f"request {request.id!r}: top_log_probs and prompt_log_probs are at temperature 1, which this engine does"
            " not report. Leave them out, or use rollout.name=native."
        )


def accept_reported(
    sequence: Sequence, tokens: Iterable[int], log_probs: Iterable[float], version: int, after_truncation: bool
) -> bool:
    """Append tokens until one is its last; True if one is.

    `log_probs` are at the request's temperature (greedy: at 1), penalties, biases and bans included; top-k, top-p and
    min-p too where the engine reports `after_truncation`.
    """
    output = sequence.output
    for token, reported in zip(tokens, log_probs, strict=True):
        _require_finite(sequence, token, reported, version)
        policy, raw, drawn = _columns(sequence.params, len(output.token_ids), reported, after_truncation)
        sequence.token_ids.append(token)
        output.token_ids.append(token)
        output.log_probs.append(policy)
        output.raw_log_probs.append(raw)
        output.sampled_log_probs.append(drawn)
        output.versions.append(version)
        if sequence.is_finished():
            sequence.done = True
            return True
    return False


def _columns(
    params: SamplingParams, position: int, reported: float, after_truncation: bool
) -> tuple[float, float, float]:
    """The log-prob of the policy at the temperature, at temperature 1, and of the distribution drawn from."""
    altered = params.penalised or bool(params.logit_bias) or position < params.min_new_tokens
    truncates = params.truncated and after_truncation
    policy = math.nan if altered or truncates else reported
    raw = policy if params.greedy or params.temperature == 1 else math.nan
    drawn = reported if truncates or not params.truncated else math.nan
    return policy, raw, 0.0 if params.greedy else drawn


def _require_finite(sequence: Sequence, token: int, reported: float, version: int) -> None:
    if not math.isfinite(reported):
        raise FloatingPointError(
            f"rollout: weights of version {version} give log-prob {reported} to token {token} of request"
            f" {sequence.request.id!r}. The weights hold NaN or inf, or overflow in rollout.dtype."
        )
