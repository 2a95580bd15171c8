"""One greedy response per prompt: generated beside the sampled ones, and split off as their baseline."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests.support.scripted_hosts import ScriptedEngine, scripted_config
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.generator import rollout_rows, split_off_baselines
from verl.types.request import Output, Request
from verl.workers.rollout.engine_host import EngineHost

PROMPTS = DataProto.from_dict(
    {"input_ids": torch.tensor([[5], [6]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)},
    {"uid": object_array(["a", "b"])},
)


def requests_from(rows: DataProto, **sampling: Any) -> list[Request]:
    """What a host submits to its engine for these rows."""
    requests: list[Request] = []

    class Engine(ScriptedEngine):
        def submit(self, submitted: Sequence[Request]) -> list[Future[Output]]:
            requests.extend(submitted)
            return super().submit(submitted)

    engine: Any = Engine(scripted_config().actor_rollout_ref.rollout)
    host = EngineHost(engine)
    host.start("job", {"step": 1, "seed": 1, **sampling})
    host.submit("job", rows)
    host.close()
    return requests


def test_each_prompt_is_sampled_n_times_and_decoded_greedily_once():
    rows = rollout_rows(PROMPTS, n=2, greedy=True)
    assert rows.non_tensor_batch["uid"].tolist() == ["a", "a", "a", "b", "b", "b"]
    assert rows.non_tensor_batch["sample_index"].tolist() == [0, 1, 2, 0, 1, 2]
    requests = requests_from(rows, temperature=0.7)
    assert [request.params.greedy for request in requests] == [False, False, True] * 2
    assert {request.params.temperature for request in requests} == {0.7}


def test_without_a_baseline_no_request_is_greedy_and_the_sampled_ones_are_the_same():
    plain = requests_from(rollout_rows(PROMPTS, n=2, greedy=False))
    beside = requests_from(rollout_rows(PROMPTS, n=2, greedy=True))
    assert not any(request.params.greedy for request in plain)
    assert [r.params.key for r in plain] == [r.params.key for r in beside if not r.params.greedy]


def test_the_greedy_score_becomes_the_baseline_of_its_prompt():
    rows = rollout_rows(PROMPTS, n=2, greedy=True)
    scores = [0.1, 0.2, 0.9, 0.3, 0.4, 0.7]
    rows.batch["token_level_scores"] = torch.tensor([[0.0, score] for score in scores])
    kept = split_off_baselines(rows)
    assert kept.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert kept.batch["token_level_scores"].sum(-1).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert kept.batch["reward_baselines"].tolist() == pytest.approx([0.9, 0.9, 0.7, 0.7])
    assert "do_sample" not in kept.non_tensor_batch
