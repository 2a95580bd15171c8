"""A stub agent loop: trajectories of 1 to 3 rows with turns of an environment, in groups that are not all full."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from tests.support.requests import requests_of
from verl.protocol import DataProto
from verl.types.trajectory import Row, Trajectory, Turn
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.output import rows_from_trajectories
from verl.workers.rollout.prompts import sampling_params, trajectories_from_prompts

TOOL = (70, 71, 72)  # what the environment says
NOTE = (80, 81)  # what a rewritten context begins with


def rows_wanted(trajectory: Trajectory) -> int:
    """0 to 3, the same in every run; 0: the agent failed and there is no answer. Sample 0 always has one."""
    drawn = zlib.crc32(trajectory.name.encode()) % 7
    return max(1, drawn % 4) if trajectory.sample_index == 0 else drawn % 4


class AgentRollout(HFRollout):
    """Samples every turn with the engine; each row has two turns with the environment's words between them."""

    def generate_sequences(self, prompts: DataProto, **overrides: Any) -> DataProto:
        params = sampling_params(self.config, prompts.meta_info, self.eos_token_ids, **overrides)
        params = replace(params, max_new_tokens=3)
        trajectories = trajectories_from_prompts(prompts)
        requests = requests_of(prompts, params, seed=int(prompts.meta_info["seed"]))
        made = []
        for trajectory, request in zip(trajectories, requests, strict=True):
            first, rows = list(request.prompt_ids), []
            for number in range(rows_wanted(trajectory)):
                context = first + list(NOTE) * number
                turns: list[Turn] = []
                for turn in range(2):
                    said = [token for each in turns for token in each.token_ids]
                    asked = replace(
                        request, id=f"{request.id}.{number}.{turn}", prompt_ids=[*context, *said], params=params
                    )
                    turns.append(Turn.sampled(self.submit([asked])[0].result()))
                    turns += [Turn("environment", TOOL)] if turn == 0 else []
                if zlib.crc32(f"{trajectory.name}.{number}".encode()) % 2:
                    turns[-1].finish_reason = "stop"
                rows.append(Row(context, turns))
            if rows:
                made.append(replace(trajectory, rows=rows, extra={"num_turns": 2 * len(rows)}))
        return rows_from_trajectories(made, int(prompts.meta_info["pad_token_id"]))
