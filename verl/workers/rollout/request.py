"""The rollout primitive's question and answer: one request, one output, in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.utils.token_sampling import SamplingParams

__all__ = ["Output", "Request", "SamplingParams"]


@dataclass(slots=True)
class Output:
    """What was sampled: one log-prob and one weight version per token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    """stop (an end token, which is the last one here), length, or abort; an aborted output can be resumed from."""


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
