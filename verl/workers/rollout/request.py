"""The rollout primitive's question and answer, by the name users know; they live in `verl.inference.request`."""

from verl.inference.request import Output, Request, SamplingParams

__all__ = ["Output", "Request", "SamplingParams"]
