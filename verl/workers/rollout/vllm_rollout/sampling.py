"""A request's sampling parameters as vLLM spells them."""

from __future__ import annotations

from typing import Any

from verl.inference.sequence import Sequence
from verl.utils.counter_noise import engine_seed

__all__ = ["sampling_arguments"]


def sampling_arguments(sequence: Sequence) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` that take this sequence to its end from the tokens that it has."""
    params, generated = sequence.params, len(sequence.output.token_ids)
    if params.greedy:
        drawn: dict[str, Any] = {"temperature": 0.0}
    else:
        drawn = {
            "temperature": params.temperature,
            "top_k": max(0, params.top_k),
            "top_p": params.top_p,
            "min_p": params.min_p,
            # Noise is drawn from the first token of this call on: what is resumed gets noise of its own.
            "seed": engine_seed(params.key, generated),
        }
    return drawn | {
        "max_tokens": sequence.max_length - len(sequence.token_ids),
        "min_tokens": max(0, min(sequence.min_length, sequence.max_length) - len(sequence.token_ids)),
        "stop_token_ids": sorted(params.ends),
        # Those above are all; the model's own come with the request.
        "ignore_eos": True,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        # 0: of the sampled token alone.
        "logprobs": params.top_log_probs,
        "prompt_logprobs": params.top_log_probs if params.prompt_log_probs else None,
    }
