"""A generation that stays open: requests go on through hand-overs of weights, beside training and other generations."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_model
from tests.support.training_harness import close, make_task, make_trainer, overrides, weights
from verl.trainer.common.phases import Phases
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
    """Asks as loop workers do, and remembers what it has heard of an answer."""

    def __init__(self, replica: Any, name: str) -> None:
        self._replica, self._name = replica, name
        self.heard: list[int] = []
        self.answer: Output | None = None

    def ask(self) -> None:
        params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, key=7)
        self._replica.tell("submit_requests", self._name, [Request(self._name, PROMPT, params)])

    def listen(self, until: int, within: float = 200.0) -> None:
        """Until so many tokens are known, or all."""
        deadline = time.monotonic() + within
        while len(self.heard) < until and self.answer is None and time.monotonic() < deadline:
            collected = self._replica.ask("collect_outputs", self._name, 0.005, True)
            for piece in collected.pieces.values():
                self.heard += piece.token_ids
            for answer in collected.answers:
                self.answer = answer.output


def trained(trainer) -> None:
    """One update on answers that are generated meanwhile."""
    answered = trainer._generate(trainer.prompts.take(4))
    batch = trainer._compute_advantage(trainer._compute_reward(answered))
    batch = batch.union(trainer.actor_wg.compute_log_prob(batch))
    trainer.actor_wg.update_actor(batch)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_an_answer_under_way_goes_on_through_training_and_weight_syncs(trainer, kv):
    sync, first = WeightSync(trainer.groups, kv=kv), trainer.groups.replicas.current
    sync.sync(first)
    (replica,) = trainer.groups.open_generation()
    client = Client(replica, kv)
    client.ask()
    for step in (1, 2):
        client.listen(20 * step)
        trained(trainer)
        assert client.answer is None, "it was to be under way all the time"
        sync.release_weights()
        sync.sync(first + step)
    client.listen(LENGTH + 1)
    trainer.groups.close_generation()
    answer = client.answer
    assert answer is not None
    assert answer.token_ids[: len(client.heard)] == client.heard
    assert sorted(set(answer.versions)) == [first, first + 1, first + 2]
    assert answer.versions == sorted(answer.versions)
    model = tiny_model()
    model.load_state_dict(weights(trainer), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1))[:, 0]
    last = torch.tensor(answer.versions) == first + 2
    off = float((expected - torch.tensor(answer.log_probs)).abs()[last].max())
    assert off < 1e-3 if kv == "recompute" else off > 1e-2, "what it stands on is the new weights', or is kept"


def test_what_is_held_stands_still_and_goes_on(trainer):
    (replica,) = trainer.groups.open_generation()
    client = Client(replica, "held")
    client.ask()
    client.listen(10)
    trainer.groups.rollout.pause_rollout()
    client.listen(LENGTH + 1, within=0.05)
    known = len(client.heard)
    client.listen(LENGTH + 1, within=0.2)
    assert len(client.heard) == known < LENGTH
    trainer.groups.rollout.resume_rollout()
    client.listen(LENGTH + 1)
    trainer.groups.close_generation()
    assert client.answer is not None
    assert len(client.answer.token_ids) == LENGTH
