"""What SGLang is asked for a request, in its own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.inference.sequence import Sequence

__all__ = ["Asked", "sampling_arguments"]

_ALL_TOKENS = 1 << 30
# Added to the logit of a token that must not be drawn.
_BANNED = -1e9


@dataclass(slots=True)
class Asked:
    """The tokens so far, and how to go on: each phase from where the one before has ended."""

    token_ids: list[int]
    phases: list[dict[str, Any]]
    """SGLang's sampling parameters."""
    key: str
    """Only requests of the same key share KV."""
    top_log_probs: int
    prompt_log_probs: bool

    @classmethod
    def of(cls, sequence: Sequence, key: str, own_ends: frozenset[int]) -> Asked:
        """What takes this sequence to its end from the tokens that it has; `own_ends` as in `sampling_arguments`.

        SGLang's `min_new_tokens` needs a tokenizer: until an answer is long enough, its ends are banned by their biases
        instead, in a phase of their own.
        """
        params = sequence.params
        phase = sampling_arguments(sequence, own_ends)
        total, banned = phase["max_new_tokens"], phase.pop("min_new_tokens") if params.ends else 0
        biases = (phase["logit_bias"] or {}) | {str(token): _BANNED for token in params.ends}
        first: dict[str, Any] = {
            "max_new_tokens": banned,
            "logit_bias": biases,
            "stop_token_ids": [],
            "ignore_eos": True,
        }
        phases = [phase | first] if banned else []
        if total > banned:
            phases.append(phase | {"min_new_tokens": 0, "max_new_tokens": total - banned})
        return cls(list(sequence.token_ids), phases, key, params.top_log_probs, params.prompt_log_probs)


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
        "min_new_tokens": max(0, min(sequence.min_length, sequence.max_length) - len(sequence.token_ids)),
        "stop_token_ids": sorted(params.ends),
        "ignore_eos": not own_ends <= params.ends,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
    }
