"""`verl check`: one report of a run's data, reward, tools and template; problems have exit code 1."""

from __future__ import annotations

import importlib.util
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl.cli.check import labelled_segments, main
from verl.cli.check_report import NOT_TRAINED, TRAINED, Segment
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
    monkeypatch.setattr(registry, "SCORE_FUNCTIONS", dict(registry.SCORE_FUNCTIONS))  # reward.py registers a function
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
    assert re.search(r"my_task +│ 64 +│ reward +│ 64/64", report), "every ground truth scores 1"
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
    report, _, result = capsys.readouterr().out.partition("== result")
    assert re.search(r"my_task +│ 64 +│ custom", report)
    assert "nothing.parquet" in result
    assert "reward function cannot be trusted" in result


def test_a_library_that_cannot_be_imported_is_listed_once(overrides, capsys):
    assert main([*overrides, "external_libs=[no_such_module_of_ours]"]) == 1
    result = capsys.readouterr().out.partition("== result")[2]
    assert result.count("no_such_module_of_ours") == 1


def test_an_invalid_configuration_has_exit_code_2(capsys):
    assert main(["data.trian_files=a.parquet"]) == 2
    assert "data.train_files" in capsys.readouterr().err


def test_a_configuration_file_with_some_blocks(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.setattr(registry, "SCORE_FUNCTIONS", dict(registry.SCORE_FUNCTIONS))
    # A file of its own: reward.py is loaded once per process, and its registration ended with another test.
    (project / "own_reward.py").write_text((project / "reward.py").read_text())
    (project / "mine.yaml").write_text(
        "data: {train_files: data/train.parquet, train_batch_size: 16, max_prompt_length: 24,"
        " max_response_length: 32}\n"
        "actor_rollout_ref: {model: {path: model}, actor: {ppo_mini_batch_size: 16}}\n"
        "custom_reward_function: {path: own_reward.py}\n"
    )
    assert main(["--config-path", str(project), "--config-name", "mine", "--rows", "1", "--scored", "4"]) == 0
    assert "ok: this reward distinguishes right from wrong" in capsys.readouterr().out
    (project / "composed.yaml").write_text("defaults: [mine, _self_]\ncustom_reward_function: {path: absent.py}\n")
    assert main(["--config-path", str(project), "--config-name", "composed", "--rows", "1"]) == 1
    result = capsys.readouterr().out.partition("== result")[2]
    assert result.count("custom_reward_function.path") == 1, "reported once"


def test_supervised_rows_show_the_trained_tokens(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    arguments = ["data.train_files=data/sft.parquet", "data.multiturn=True", "data.max_length=96", "model.path=model"]
    assert main(["sft", *arguments, "data.train_batch_size=4", "--rows", "1"]) == 0
    report = capsys.readouterr().out
    assert "│ trained" in report
    assert "20 rows; data.max_length = 96" in report


def test_runs_of_trained_tokens():
    item = {"input_ids": torch.arange(5), "loss_mask": torch.tensor([0, 0, 1, 1, 0])}
    expected = [Segment([0, 1], NOT_TRAINED), Segment([2, 3], TRAINED), Segment([4], NOT_TRAINED)]
    assert list(labelled_segments(item)) == expected


@pytest.fixture
def pairs(project, monkeypatch):
    """Overrides of a reward-model run; `write(rows)` writes its file of pairs."""
    monkeypatch.chdir(project)

    def write(rows):
        pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
        return [
            "rm",
            "data.train_files=pairs.parquet",
            "data.train_batch_size=1",
            "data.max_length=16",
            "model.path=model",
        ]

    return write


def test_pairs_show_where_the_score_is_read(pairs, capsys):
    rows = [
        {"prompt": "Tom has 3 cups .", "chosen": "#### 3", "rejected": "#### 4 cups", "margin": 0.5},
        {"prompt": "Tom has 3 cups .", "chosen": "#### 3", "rejected": "4", "margin": 0.0},
        {"prompt": "Ana has 2 pens .", "chosen": "#### 2 pens", "rejected": "5", "margin": 0.0},
    ]
    assert main([*pairs(rows), "--rows", "1"]) == 0
    report = capsys.readouterr().out
    assert "prompt 0 (3 responses, 2 pairs): chosen (preference 1, margin 0.5, weight 1)" in report
    table = report.partition(": chosen (")[2].partition(": rejected (")[0]
    cells = [[cell.strip() for cell in line.split("│")[1:4]] for line in table.splitlines() if "│" in line]
    # <|user|> Tom has 3 cups . <|assistant|> | #### 3 | <|end|>
    assert cells == [
        ["prompt", "7", "<|user|> Tom has 3 cups . <|assistant|>"],
        ["response", "2", "#### 3"],
        ["scored", "1", "<|end|>"],
    ]
    assert "3 pairs of 2 prompts: 0 ties, 0 with equal responses" in report
    assert "tokens of chosen responses: 50% ≤ 3, 90% ≤ 3, 99% ≤ 3, 100% ≤ 4; 10 in total" in report
    assert "the chosen response is longer in 67% of pairs" in report
    assert "do not end with an end token" not in report


def test_problems_of_pairs(pairs, capsys):
    row = {"prompt": "Tom has 3 cups .", "chosen": "#### 3", "rejected": "#### 3"}
    assert main(pairs([row])) == 1
    assert "both responses are equal in all pairs" in capsys.readouterr().out
    assert main([*pairs([{**row, "rejected": "4"}]), "data.max_length=9", "data.truncation=right"]) == 0
    assert "note: 1 of 2 responses do not end with an end token" in capsys.readouterr().out
    assert main(pairs([{**row, "rejected": None}, row])) == 1
    assert "'rejected'" in capsys.readouterr().out
