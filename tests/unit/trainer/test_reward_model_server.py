"""A run with a judge of its own: a language model rates answers, and is parked while the policy uses its device."""

from __future__ import annotations

import pytest

from tests.support.tiny import save_tiny_model
from tests.support.training_harness import make_task, overrides, run_training

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow

SCHEMA = (
    "{type: object, properties: {score: {type: integer, minimum: 0, maximum: 10}}, required: [score], "
    "additionalProperties: false}"
)
JUDGE = (
    "reward_model.enable=True",
    "reward_model.judge.template='Rate {{ answer }} to {{ prompt }}.'",
    f"reward_model.judge.json_schema={SCHEMA}",
    "reward_model.judge.temperature=1.0",
    "reward_model.judge.max_tokens=200",
    "reward_model.rollout.max_num_seqs=16",
    "reward_model.reward_kwargs.num_processes=1",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    save_tiny_model(folder / "judge", seed=5)
    return folder, make_task(folder)


def test_a_judge_of_the_run_rates_every_answer(task, tmp_path):
    folder, paths = task
    given = (f"reward_model.path={folder / 'judge'}", "custom_reward_function.path=null", "trainer.test_freq=2")
    trainer = run_training(overrides(paths, tmp_path, *JUDGE, *given, "reward_model.judge.enable=True"))
    assert len(trainer.history) == 2
    for step in trainer.history:
        assert step["reward/errors"] == 0
        assert step["reward/judge_unreadable/mean"] == 0
        assert 0 < step["reward/mean"] < 1
    assert any(name.startswith("val-") for name in trainer.history[-1])


def test_a_function_of_the_user_asks_the_model_that_the_run_serves(task, tmp_path):
    folder, paths = task
    (tmp_path / "mine.py").write_text(
        "import httpx\n\n"
        "async def compute_score(solution_str, ground_truth, reward_router_address, reward_model_tokenizer):\n"
        "    ids = reward_model_tokenizer(solution_str)['input_ids']\n"
        "    body = {'prompt': ids or [5], 'max_tokens': 3, 'temperature': 0}\n"
        "    async with httpx.AsyncClient() as client:\n"
        "        reply = await client.post(f'http://{reward_router_address}/v1/completions', json=body)\n"
        "    return {'score': 0.5, 'said': reply.json()['usage']['completion_tokens']}\n"
    )
    given = (f"reward_model.path={folder / 'judge'}", f"custom_reward_function.path={tmp_path / 'mine.py'}")
    trainer = run_training(overrides(paths, tmp_path, *JUDGE[:1], *JUDGE[5:], *given, "trainer.total_training_steps=1"))
    (step,) = trainer.history
    assert step["reward/errors"] == 0
    assert step["reward/said/mean"] == 3
