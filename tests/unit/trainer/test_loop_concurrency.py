"""agent.max_concurrent_requests limits the conversations of agents and never single-turn rows."""

from __future__ import annotations

import threading

import pytest

from tests.support.training_harness import close, make_task, make_trainer, overrides
from verl.trainer.common.run_status import Phases
from verl.workers.rollout.embedded_rollout import EmbeddedRollout

ROLLOUT = "actor_rollout_ref.rollout"
AGENT = """
from verl.agent.single_turn import SingleTurnAgentLoop


class Own(SingleTurnAgentLoop):
    pass
"""


class Concurrency:
    """The largest number of requests that the engine had at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self._now, self._lock = 0, 0, threading.Lock()
        submit = EmbeddedRollout.submit

        def counted(rollout, requests):
            self._add(len(requests))
            futures = submit(rollout, requests)
            for future in futures:
                future.add_done_callback(lambda _: self._add(-1))
            return futures

        monkeypatch.setattr(EmbeddedRollout, "submit", counted)

    def _add(self, requests: int) -> None:
        with self._lock:
            self._now += requests
            self.most = max(self.most, self._now)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops")
    (folder / "own.py").write_text(AGENT)
    return make_task(folder) | {"agent": f"{folder / 'own.py'}:Own"}


@pytest.mark.parametrize(("loop", "possible"), [("single_turn_agent", {16}), ("agent", {1, 2, 3})])
def test_an_explicit_number_limits_agents_only(task, tmp_path, monkeypatch, loop, possible):
    engine = Concurrency(monkeypatch)
    settings = (
        "algorithm=grpo",
        "data.val_files=[]",
        "reward_model.reward_kwargs={num_processes: 0}",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.agent.max_concurrent_requests=3",
        f"{ROLLOUT}.agent.default_agent_loop={task.get(loop, loop)}",
    )
    trainer = make_trainer(overrides(task, tmp_path, *settings))
    try:
        trainer.init_workers()
        trainer.phases = Phases(None, None)
        trainer.weight_sync.sync(0)
        engine.most = 0
        assert len(trainer._generate(trainer.state.prompts.take(8))) == 16
    finally:
        close(trainer)
    assert engine.most in possible
