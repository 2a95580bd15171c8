"""What the controller refuses ends in a few last lines with key, cause and remedy; tests/e2e has the whole commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training_harness import make_task, overrides
from verl.config import load_config
from verl.single_controller.ray import resource_pool
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.recovery.exit_messages import attach_resume_hint, exit_with_message


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch, logging_as_before) -> None:
    """A command ends its own Ray; the one here is that of other tests."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def last_lines(capsys: Any, act: Any, code: int) -> list[str]:
    with pytest.raises(SystemExit) as ended, exit_with_message():
        act()
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-2:]


def controller(task: dict[str, str], folder: Path, *more: str) -> Any:
    config = load_config(None, overrides(task, folder, "algorithm.adv_estimator=grpo", *more))

    def run() -> None:
        with attach_resume_hint(config.trainer):
            TaskRunner().run(config)

    return run


def test_a_model_that_cannot_be_fetched_is_named_by_its_key_with_what_to_do(task, tmp_path, capsys):
    run = controller(task, tmp_path, "actor_rollout_ref.model.path=org/absent")
    log, cause = last_lines(capsys, run, code=1)
    assert cause.startswith("actor_rollout_ref.model.path: 'org/absent' ")
    assert cause.endswith("hf download org/absent")
    assert log.startswith("Full traceback in ")
    assert "Traceback" in Path(log.removeprefix("Full traceback in ").removesuffix(".")).read_text()


def test_a_data_source_without_a_reward_is_a_problem_of_the_data(task, tmp_path, capsys):
    run = controller(task, tmp_path, "custom_reward_function.path=null")
    head, problem = last_lines(capsys, run, code=2)
    assert head == "1 problem in the data:"
    assert f"{task['train']} row 0 (and 31 more rows): no reward function is known for data_source 'toy'" in problem
    assert "Set custom_reward_function.path, or register one" in problem


def test_too_few_gpus_are_said_with_what_is_there_and_the_key(capsys, monkeypatch):
    nodes = [resource_pool.RayNode("a", "10.0.0.1", 2.0, 2.0)]
    monkeypatch.setattr(resource_pool, "alive_nodes", lambda: nodes)
    log, cause = last_lines(capsys, lambda: resource_pool.choose_nodes([8], True, "global_pool"), code=1)
    assert log.startswith("Full traceback in ")
    assert "1 node(s) with [8] GPUs" in cause
    assert "10.0.0.1 (2 of 2 GPUs free)" in cause
    assert "Set trainer.n_gpus_per_node" in cause
    Path(log.removeprefix("Full traceback in ").removesuffix(".")).unlink()


def test_a_cause_that_is_no_valid_text_is_in_the_traceback(capsys):
    def run() -> None:
        raise ValueError("the response is not text") from KeyError("… \ud800")

    log, cause = last_lines(capsys, run, code=1)
    file = Path(log.removeprefix("Full traceback in ").removesuffix("."))
    assert "… \\ud800" in file.read_text("utf-8")
    assert cause == "the response is not text"
    file.unlink()
