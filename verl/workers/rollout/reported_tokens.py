"""What an engine of other make says of a token, as the columns of an `Output`: what it does not say is NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from verl.inference.sequence import Sequence
from verl.types.request import SamplingParams
from verl.types.routed_experts import split_entries

__all__ = ["Factors", "accept_reported", "accept_reported_experts", "accept_scaled", "column_factors"]


def accept_reported(
    sequence: Sequence, tokens: Iterable[int], log_probs: Iterable[float], version: int, after_truncation: bool
) -> bool:
    """Append tokens until one is its last; True if one is.

    `log_probs` are at the request's temperature (greedy: at 1), penalties, biases and bans included; top-k, top-p and
    min-p too where the engine reports `after_truncation`.
    """
    return accept_scaled(sequence, tokens, log_probs, version, column_factors(sequence.params, after_truncation))


Factors = tuple[float, float, float]
"""What a reported log-prob is multiplied by to give a column: 1 where it is that, 0 for what was certain, NaN."""


def column_factors(params: SamplingParams, after_truncation: bool) -> Factors:
    """Of the policy's log-prob at the temperature, that at temperature 1, and that of the distribution drawn from."""
    truncates = params.truncated and after_truncation
    policy = math.nan if params.penalised or params.logit_bias or truncates else 1.0
    raw = policy if params.greedy or params.temperature == 1 else math.nan
    drawn = 1.0 if truncates or not params.truncated else math.nan
    return policy, raw, 0.0 if params.greedy else drawn


def accept_scaled(
    sequence: Sequence, tokens: Iterable[int], log_probs: Iterable[float], version: int, factors: Factors
) -> bool:
    """The same for an engine that asks once per request for its `column_factors`."""
    output, (policy, raw, drawn) = sequence.output, factors
    for token, reported in zip(tokens, log_probs, strict=True):
        if not math.isfinite(reported):
            raise FloatingPointError(
                f"rollout: weights of version {version} give log-prob {reported} to token {token} of request"
                f" {sequence.request.id!r}. The weights hold NaN or inf, or overflow in rollout.dtype."
            )
        banned = len(output.token_ids) < sequence.params.min_new_tokens  # tokens that end an answer
        sequence.token_ids.append(token)
        output.token_ids.append(token)
        output.log_probs.append(math.nan if banned else reported * policy)
        output.raw_log_probs.append(math.nan if banned else reported * raw)
        output.sampled_log_probs.append(reported * drawn)
        output.versions.append(version)
        if sequence.is_finished():
            sequence.done = True
            return True
    return False


def accept_reported_experts(sequence: Sequence, experts: np.ndarray, version: int) -> None:
    """Take the experts [prompt and response tokens, layers, k] that an engine reports when a request ends.

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
