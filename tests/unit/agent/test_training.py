"""Whole runs with `rollout.mode=async`, in one process with the real engine: agents generate, training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.training_harness import close, make_task, make_trainer, overrides, run_training
from verl.agent.worker import AgentLoopWorker
from verl.protocol import DataProto, object_array
from verl.workers.roles.policy import ActorRolloutRefWorker

ROLLOUT = "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.test_freq=1")
ASYNC = (*GRPO, f"{ROLLOUT}.mode=async")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("agents"))


class Closing(AgentLoopWorker):
    closed = 0

    def close(self) -> None:
        super().close()
        Closing.closed += 1


class Own(AgentLoopWorker):
    def generate_sequences(self, *args, **kwargs):
        return super().generate_sequences(*args, **kwargs)


def test_a_stream_does_not_pass_by_what_a_worker_does_with_a_batch(task: dict[str, str], tmp_path: Path):
    own = f"{ROLLOUT}.agent.agent_loop_manager_class={__name__}.Own"
    trainer = make_trainer(overrides(task, tmp_path, *GRPO, "trainer.mode=async", own))
    with pytest.raises(ValueError, match=r"agent_loop_manager_class = .*Own.*trainer\.mode=sync"):
        trainer.init_workers()
    trainer.state.end()
    close(trainer)


def measured(history: list[dict[str, float]], names: Iterable[str]) -> list[dict[str, float]]:
    """But for what a clock says."""
    clocked = ("timing", "perf/", "checkpoint/", "reward/scored_while")
    return [{name: step[name] for name in names if not name.startswith(clocked)} for step in history]


def test_single_turn_agents_train_bit_for_bit_as_the_engine_alone_does(task: dict[str, str], tmp_path: Path):
    alone = run_training(overrides(task, tmp_path / "sync", *GRPO))
    closing = f"{ROLLOUT}.agent.agent_loop_manager_class={__name__}.Closing"
    agents = run_training(overrides(task, tmp_path / "async", *ASYNC, closing))
    assert Closing.closed == 1, "its tools are let go of at the end"
    for step, names in enumerate(alone.history):
        assert measured(agents.history[step : step + 1], names) == measured([names], names)
    assert len(agents.history) == len(alone.history)
    assert agents.history[0]["num_turns/mean"] == 2
    # The data asks for what this run does not do.
    rows = DataProto.from_single_dict(next(iter(alone.train_dataloader)))
    rows.non_tensor_batch["agent_name"] = object_array(["tool_agent"] * len(rows))
    with pytest.raises(ValueError, match=r"agent_name.*actor_rollout_ref\.rollout\.mode=async"):
        alone.generator.generate(rows, step=3, validate=False, reward_fn=None, retry=lambda call: call())


def test_a_tool_that_cannot_work_is_told_before_models_are_loaded(task, tmp_path: Path, monkeypatch):
    (tmp_path / "sick.py").write_text(
        "from verl.tools.base_tool import BaseTool\n"
        "class Sick(BaseTool):\n    def check(self):\n        return 'its server is down'\n"
    )
    schema = "{type: function, function: {name: look, description: x, parameters: {type: object, properties: {}}}}"
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"tools:\n  - {{class_name: '{tmp_path}/sick.py:Sick', config: {{}}, tool_schema: {schema}}}\n")
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: pytest.fail("a model is loaded"))
    turns = (f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.tool_config_path={tools}")
    with pytest.raises(Exception, match=r"look.*its server is down"):
        run_training(overrides(task, tmp_path, *ASYNC, *turns))
