"""A request's sampling parameters as SGLang spells them."""

from __future__ import annotations

from typing import Any

from verl.inference.sequence import Sequence

__all__ = ["sampling_arguments"]

_ALL_TOKENS = 1 << 30


def sampling_arguments(sequence: Sequence, own_ends: frozenset[int]) -> dict[str, Any]:
    """SGLang's sampling parameters that take this sequence to its end from the tokens that it has.

    `own_ends` are the tokens at which SGLang ends every answer of this model by itself. Where the request wants to go
    on after one of them, it is told to ignore all ends, and they are found here.
    """
    params = sequence.params
    if params.greedy:
        drawn: dict[str, Any] = {"temperature": 0.0}
    else:
        drawn = {
            "temperature": params.temperature,
            "top_k": params.top_k if params.top_k > 0 else _ALL_TOKENS,
            "top_p": params.top_p,
            "min_p": params.min_p,
        }
    return drawn | {
        "max_new_tokens": sequence.max_length - len(sequence.token_ids),
        "stop_token_ids": sorted(params.ends),
        "ignore_eos": not own_ends <= params.ends,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
    }
