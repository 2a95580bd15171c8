"""A stub of an agent loop: trajectories of 0 to 3 rows with environment turns, so some groups are incomplete."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from tests.support.requests import requests_of
from verl.protocol import DataProto
from verl.types.trajectory import Row, Trajectory, Turn
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.prompts import sampling_params, trajectories_from_prompts
from verl.workers.rollout.training_rows import rows_from_trajectories

TOOL = (70, 71, 72)  # tokens of an environment turn
SUMMARY = (80, 81)  # appended to the prompt of a rewritten context


def row_count(trajectory: Trajectory) -> int:
    """Return 0 to 3, deterministic by name; 0 stands for a failed agent. Sample 0 always has at least one row."""
    count = zlib.crc32(trajectory.name.encode()) % 7 % 4
    return max(1, count) if trajectory.sample_index == 0 else count


class AgentRollout(HFRollout):
    """Samples every model turn with the engine; each row has two of them with an environment turn in between."""

    def generate_sequences(self, prompts: DataProto, **overrides: Any) -> DataProto:
        params = sampling_params(self.config, prompts.meta_info, self.eos_token_ids, **overrides)
        params = replace(params, max_new_tokens=3)
        trajectories = trajectories_from_prompts(prompts)
        requests = requests_of(prompts, params, seed=int(prompts.meta_info["seed"]))
        finished = []
        for trajectory, request in zip(trajectories, requests, strict=True):
            prompt, rows = list(request.prompt_ids), []
            for number in range(row_count(trajectory)):
                context = prompt + list(SUMMARY) * number
                turns: list[Turn] = []
                for turn in range(2):
                    response = [token for previous in turns for token in previous.token_ids]
                    turn_request = replace(
                        request, id=f"{request.id}.{number}.{turn}", prompt_ids=[*context, *response], params=params
                    )
                    turns.append(Turn.sampled(self.submit([turn_request])[0].result()))
                    turns += [Turn("environment", TOOL)] if turn == 0 else []
                if zlib.crc32(f"{trajectory.name}.{number}".encode()) % 2:
                    turns[-1].finish_reason = "stop"
                rows.append(Row(context, turns))
            if rows:
                finished.append(replace(trajectory, rows=rows, extra={"num_turns": 2 * len(rows)}))
        return rows_from_trajectories(finished, int(prompts.meta_info["pad_token_id"]))
