"""The engine's question and answer: one request, one output, in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.utils.sampling_params import SamplingParams

__all__ = ["Output", "Request", "SamplingParams", "check_request"]


@dataclass(slots=True)
class Output:
    """What was sampled: one log-prob and one weight version per token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of the full distribution at the request's temperature: what training computes."""
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    """stop (an end token, or the token that completes a stop string, which is the last one here), length, or abort;
    an aborted output can be resumed from."""
    raw_log_probs: list[float] = field(default_factory=list)
    """At temperature 1, nothing cut off; empty from engines that do not know it."""
    sampled_log_probs: list[float] = field(default_factory=list)
    """Under the distribution really sampled from: temperature, top-k, top-p, min-p, bans. Empty if not known."""


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be sampled."""

    id: str
    """Unique among the requests an engine is working on; what `abort` takes."""
    prompt_ids: Sequence[int]
    params: SamplingParams
    group: str = ""
    """The prompt this answers (uid): requests of one group share their prompt."""
    resume_from: Output | None = None
    """An earlier output of the same request; its tokens count as generated and are returned again, first."""


def check_request(request: Request, max_model_len: int) -> None:
    """Raise ValueError for a request that no engine of this length can answer."""
    if not request.prompt_ids:
        raise ValueError(f"request {request.id!r}: the prompt is empty. Give at least one token.")
    earlier = request.resume_from
    generated = len(earlier.token_ids) if earlier else 0
    if len(request.prompt_ids) + generated >= max_model_len:
        raise ValueError(
            f"request {request.id!r}: {len(request.prompt_ids)} prompt and {generated} generated tokens leave no room"
            f" in actor_rollout_ref.rollout.max_model_len={max_model_len}. Raise it, or shorten data.max_prompt_length."
        )
    if earlier and (earlier.finish_reason == "stop" or generated >= request.params.max_new_tokens):
        raise ValueError(
            f"request {request.id!r}: resume_from is finished ({generated} tokens); nothing is left to do."
        )
    if earlier and not len(earlier.token_ids) == len(earlier.log_probs) == len(earlier.versions):
        raise ValueError(f"request {request.id!r}: resume_from needs one log-prob and one version per token.")
