"""`verl check`: one report of a run's data, reward, tools and template; problems have exit code 1."""

from __future__ import annotations

import importlib.util

import pytest

from verl.cli.check import Segment, _runs, main
from verl.cli.init import create_project
from verl.utils.reward_score import registry

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The starter project with less data."""
    folder = tmp_path_factory.mktemp("check") / "mine"
    create_project(folder)
    spec = importlib.util.spec_from_file_location("starter_prepare", folder / "prepare.py")
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.ROWS = {"sft": 20, "train": 64, "val": 8}
    prepare.write_data()
    prepare.write_model()
    return folder


@pytest.fixture
def overrides(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))  # reward.py registers a function
    return [
        "algorithm=grpo",
        "data.train_files=data/train.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=24",
        "data.max_response_length=64",
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        f"{ROLLOUT}.max_model_len=96",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path=tools.py",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=8",
    ]


def test_the_report_of_a_run_with_a_tool(overrides, capsys):
    assert main([*overrides, "custom_reward_function.path=reward.py", "--rows", "1", "--scored", "4"]) == 0
    report = capsys.readouterr().out
    assert "<|end|> = 1" in report
    assert "calculate(expression): Evaluate an arithmetic expression." in report
    assert "64/64" in report, "every ground truth scores 1"
    trained = [line for line in report.splitlines() if line.startswith("│ trained")]
    assert ["<tool_call>" in line for line in trained] == [True, False]
    assert "####" in trained[1]
    assert all("<|end|>" in line for line in trained)
    assert "ok: the run can start" in report


def test_problems_are_listed_and_the_exit_code_is_1(overrides, project, capsys):
    (project / "always.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    arguments = [*overrides, "custom_reward_function.path=always.py", "data.val_files=nothing.parquet", "--scored", "4"]
    assert main(arguments) == 1
    result = capsys.readouterr().out.partition("== result")[2]
    assert "nothing.parquet" in result
    assert "reward function cannot be trusted" in result


def test_an_invalid_configuration_has_exit_code_2(capsys):
    assert main(["data.trian_files=a.parquet"]) == 2
    assert "data.train_files" in capsys.readouterr().err


def test_a_configuration_file_with_some_blocks(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    (project / "mine.yaml").write_text(
        "data: {train_files: data/train.parquet, train_batch_size: 16, max_prompt_length: 24,"
        " max_response_length: 32}\n"
        "actor_rollout_ref: {model: {path: model}, actor: {ppo_mini_batch_size: 16}}\n"
        "custom_reward_function: {path: reward.py}\n"
    )
    assert main(["--config-path", str(project), "--config-name", "mine", "--rows", "1", "--scored", "4"]) == 0
    assert "ok: this reward distinguishes right from wrong" in capsys.readouterr().out
    (project / "composed.yaml").write_text("defaults: [mine]\n")
    assert main(["--config-name", "composed"]) == 1
    assert "--cfg job" in capsys.readouterr().out


def test_supervised_rows_show_the_trained_tokens(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    arguments = ["data.train_files=data/sft.parquet", "data.multiturn=True", "data.max_length=96", "model.path=model"]
    assert main(["sft", *arguments, "data.train_batch_size=4", "--rows", "1"]) == 0
    report = capsys.readouterr().out
    assert "│ trained" in report
    assert "in 20 rows" in report


def test_runs_of_trained_tokens():
    import torch

    item = {"input_ids": torch.arange(5), "loss_mask": torch.tensor([0, 0, 1, 1, 0])}
    assert list(_runs(item)) == [Segment([0, 1], False), Segment([2, 3], True), Segment([4], False)]
