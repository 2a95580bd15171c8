"""Generation that stays open: requests continue through weight syncs, beside training and other generations."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_model
from tests.support.training_harness import actor_weights, close, make_task, make_trainer, overrides
from verl.trainer.common.run_status import Phases
from verl.trainer.ppo.weight_sync import WeightSync
from verl.types.request import Output, Request, SamplingParams

LENGTH = 400
ASYNC = (
    "algorithm=grpo",
    "data.val_files=[]",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    f"actor_rollout_ref.rollout.max_model_len={LENGTH + 60}",
    "actor_rollout_ref.actor.optim.lr=0.05",
    "reward_model.reward_kwargs={num_processes: 0}",
)
PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open")
    made = make_trainer(overrides(make_task(folder), folder, *ASYNC))
    made.init_workers()
    made.phases = Phases(None, None)
    yield made
    close(made)


class Client:
    """Submits a request as an EngineClient does, and collects its partial outputs."""

    def __init__(self, replica: Any, name: str) -> None:
        self._replica, self._name = replica, name
        self.tokens: list[int] = []
        self.output: Output | None = None

    def submit(self) -> None:
        params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, key=7)
        self._replica.notify("host.submit_requests", self._name, [Request(self._name, PROMPT, params)])

    def collect(self, until: int, timeout: float = 200.0) -> None:
        """Until this number of tokens is known, or the output is complete."""
        deadline = time.monotonic() + timeout
        while len(self.tokens) < until and self.output is None and time.monotonic() < deadline:
            collected = self._replica.call("host.collect_outputs", self._name, 0.005, True)
            for piece in collected.partials.values():
                self.tokens += piece.token_ids
            for finished in collected.outputs:
                self.output = finished.output


def train_once(trainer) -> None:
    """One update on responses that are generated meanwhile."""
    answered = trainer._generate(trainer.state.prompts.take(4))
    batch = trainer._compute_advantage(trainer._compute_reward(answered))
    batch = batch.union(trainer.actor_wg.compute_log_prob(batch))
    trainer.actor_wg.update_actor(batch)


@pytest.mark.parametrize("kv", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_running_request_continues_through_training_and_weight_syncs(trainer, kv):
    sync, first = WeightSync(trainer.groups, kv=kv), trainer.weight_sync.replica_weights.current_version
    sync.sync(first)
    trainer.rollouts.open()
    client = Client(trainer.groups.rollout.handle(0), kv)
    client.submit()
    for step in (1, 2):
        client.collect(20 * step)
        train_once(trainer)
        assert client.output is None, "it runs all the time"
        sync.release_weights()
        sync.sync(first + step)
    client.collect(LENGTH + 1)
    trainer.rollouts.close()
    output = client.output
    assert output is not None
    assert output.token_ids[: len(client.tokens)] == client.tokens
    assert sorted(set(output.versions)) == [first, first + 1, first + 2]
    assert output.versions == sorted(output.versions)
    model = tiny_model()
    model.load_state_dict(actor_weights(trainer), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))[:, 0]
    last = torch.tensor(output.versions) == first + 2
    off = float((expected - torch.tensor(output.log_probs)).abs()[last].max())
    assert off < 1e-3 if kv == "recompute" else off > 1e-2, "its KV is recomputed with the new weights, or kept"


@pytest.mark.parametrize("free_kv", [False, True])
def test_a_paused_request_stops_and_continues(trainer, free_kv):
    trainer.rollouts.open()
    client = Client(trainer.groups.rollout.handle(0), "held")
    client.submit()
    client.collect(10)
    trainer.groups.rollout.pause_rollout(free_kv)
    later = Client(trainer.groups.rollout.handle(0), "later")
    later.submit()
    client.collect(LENGTH + 1, timeout=0.05)
    known = len(client.tokens)
    client.collect(LENGTH + 1, timeout=0.2)
    assert len(client.tokens) == known < LENGTH
    trainer.groups.rollout.resume_rollout()
    for request in (client, later):
        request.collect(LENGTH + 1)
        assert request.output is not None
        assert len(request.output.token_ids) == LENGTH
    trainer.rollouts.close()
