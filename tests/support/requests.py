"""Requests of a batch of prompts, built as EngineHost builds them."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.types.request import Request, SamplingParams
from verl.workers.rollout.prompts import RolloutJob


def requests_of(prompts: DataProto, params: SamplingParams, seed: int) -> list[Request]:
    """One request per row, in order."""
    job = RolloutJob("test", prompts.meta_info, params, seed, pad=0)
    return [job.request(task, task.limit) for task in job.tasks(prompts, {}, with_columns=False)]
