"""A request's sampling parameters as TensorRT-LLM spells them."""

from __future__ import annotations

from typing import Any

import torch

from verl.inference.sequence import Sequence
from verl.utils.counter_noise import engine_seed

__all__ = ["sampling_arguments"]

# Its own end token: none, for those of the request are stop tokens, and are told.
_NEVER = -1


def sampling_arguments(sequence: Sequence, vocab: int) -> dict[str, Any]:
    """Arguments of `SamplingParams` that take this sequence to its end from the tokens that it has."""
    params, generated = sequence.params, len(sequence.output.token_ids)
    if params.greedy:
        drawn: dict[str, Any] = {"temperature": 0.0, "top_k": 1}
    else:
        drawn = {
            "temperature": params.temperature,
            "top_k": max(0, params.top_k),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": engine_seed(params.key, generated),
        }
    return drawn | {
        "end_id": _NEVER,
        "pad_id": _NEVER,
        "max_tokens": sequence.max_length - len(sequence.token_ids),
        "min_tokens": max(0, min(sequence.min_length, sequence.max_length) - len(sequence.token_ids)),
        "stop_token_ids": sorted(params.ends) or None,
        "include_stop_str_in_output": True,
        "repetition_penalty": params.repetition_penalty,
        "embedding_bias": _bias(params.logit_bias, vocab),
        # 0: of the sampled token alone.
        "logprobs": 0,
        "detokenize": False,
    }


def _bias(given: tuple[tuple[int, float], ...], vocab: int) -> torch.Tensor | None:
    if not given:
        return None
    bias = torch.zeros(vocab)
    for token, value in given:
        bias[token] = value
    return bias
