"""The rollout primitive's question and answer, by the name users know; they live in `verl.types`."""

from verl.types.request import Output, Request, SamplingParams

__all__ = ["Output", "Request", "SamplingParams"]
