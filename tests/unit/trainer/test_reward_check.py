"""The reward check as a command, and at the start of a run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from tests.support.tiny import tiny_tokenizer
from verl.config.names import REWARD_MANAGERS
from verl.trainer.data_check import check_reward_at_start as check_at_start
from verl.trainer.data_check_command import main_data as check_data
from verl.trainer.data_check_command import main_reward as main
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.rl_dataset import RLHFDataset

HERE = ["reward_model.reward_kwargs.num_processes=0"]


def written(path, truths, source="openai/gsm8k"):
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"question {number}"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for number, truth in enumerate(truths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "rows.jsonl", [str(number) for number in range(3, 40)])


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def contains(solution_str, ground_truth):\n    return float(ground_truth in solution_str)\n\n\n"
        "def good(solution_str, ground_truth, bonus=0.0):\n"
        "    return bonus + (solution_str == f'#### {ground_truth}')\n\n\n"
        "def broken(solution_str, ground_truth):\n    raise RuntimeError('the judge is not at home')\n"
    )
    return f"custom_reward_function.path={path}"


@pytest.mark.slow
def test_the_command_runs_with_scorer_processes(file):
    command = [sys.executable, "-m", "verl.utils.reward_check", file, "--n", "10"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "scores 1 in all 10 rows" in done.stdout
    assert "ok: this reward distinguishes right from wrong" in done.stdout


def test_the_exit_code_is_the_verdict(file, own, capsys):
    assert main([file, *HERE]) == 0
    assert main([file, own, "custom_reward_function.name=good", *HERE]) == 0
    assert main([file, own, "custom_reward_function.name=contains", *HERE]) == 1
    assert "gets full score" in capsys.readouterr().out
    assert main([file, own, "custom_reward_function.name=broken", *HERE]) == 1
    assert "the judge is not at home" in capsys.readouterr().out


def test_a_reward_whose_right_answers_are_unknown_is_not_called_good(tmp_path, file, capsys):
    (tmp_path / "format.py").write_text("def compute_score(solution_str, ground_truth):\n    return 0.0\n")
    assert main([file, f"custom_reward_function.path={tmp_path / 'format.py'}", *HERE]) == 0
    output = capsys.readouterr().out
    assert "not verified" in output
    assert "distinguishes" not in output


def test_arguments_of_the_function_are_given_as_in_a_run(file, own, capsys):
    bonus = "custom_reward_function.reward_kwargs.bonus=0.5"
    assert main([file, own, "custom_reward_function.name=good", bonus, *HERE]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "scores 1.5 at least" in table
    assert "scores 0.5 at most" in table


def test_every_data_source_is_tried(tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    written(folder / "a.jsonl", ["7"] * 200)
    written(folder / "b.jsonl", ["", ""], source="math")
    assert main([str(folder), "--n", "4", *HERE]) == 1
    assert "is empty" in " ".join(capsys.readouterr().out.split())


def test_mistakes_are_told_in_one_line(tmp_path, file, capsys):
    assert main([written(tmp_path / "u.jsonl", ["7"], source="openai/gsm8"), *HERE]) == 1
    assert "Did you mean 'openai/gsm8k'" in capsys.readouterr().err
    assert main([file, "custom_reward_function.pth=x"]) == 1
    assert "custom_reward_function.path" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl")]) == 1
    assert main(["custom_reward_function.name=x"]) == 1
    assert "no data file" in capsys.readouterr().err


def started(file, *overrides):
    from verl.config import load_config

    config = load_config(
        {"data": {"train_files": [file]}, "actor_rollout_ref": {"model": {"path": "unused"}}},
        [*overrides, *HERE],
        check_files=False,
    )
    manager = load_reward_manager(config, tokenizer=None, num_examine=0)
    dataset = RLHFDataset([file], tiny_tokenizer(), {"max_prompt_length": 64})
    check_at_start(manager, dataset, config.data.reward_fn_key)


def test_at_the_start_of_a_run_doubts_are_logged_and_training_goes_on(file, own, caplog):
    with caplog.at_level(logging.INFO):
        started(file)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "scores 1 in all 8 rows" in caplog.text
    caplog.clear()
    started(file, own, "custom_reward_function.name=contains")
    assert "answer with every number: gets full score" in caplog.text


def test_rows_that_their_agent_scores_are_not_tried(tmp_path, caplog):
    row = {"data_source": "game", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"style": "agent"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    started(str(tmp_path / "rows.jsonl"))
    assert "reward check" not in caplog.text


def test_at_the_start_of_a_run_a_function_that_always_fails_is_an_error(file, own):
    with pytest.raises(ValueError, match="the judge is not at home"):
        started(file, own, "custom_reward_function.name=broken")


@pytest.mark.parametrize("name", REWARD_MANAGERS)
def test_a_dataset_that_cannot_be_validated_still_has_its_sources_checked(name):
    class OwnDataset:
        def __len__(self):
            return 3

        def __getitem__(self, item):
            return {"data_source": "nobody/knows", "reward_model": {"ground_truth": "7"}}

    manager = load_reward_manager({"reward_model": {"reward_manager": name}}, None, 0)
    with pytest.raises(ValueError, match=r"(?s)data_source.*'nobody/knows'"):
        check_at_start(manager, OwnDataset(), "data_source")


@pytest.fixture
def of_another_trainer(tmp_path):
    """Rows {prompt, answer}."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 0?", "answer": str(n)}) + "\n" for n in range(3, 20)))
    return str(path)


def test_rows_without_a_data_source_are_scored_by_an_own_function(of_another_trainer, own, capsys):
    """First without any key, then with those that the message names."""
    assert main([of_another_trainer, *HERE]) == 1
    assert "custom_reward_function.path" in capsys.readouterr().err
    keys = [own, "custom_reward_function.name=good", "data.ground_truth_key=answer"]
    assert main([of_another_trainer, *keys, *HERE]) == 0
    started(of_another_trainer, *keys)
    settings = {"max_prompt_length": 64, "ground_truth_key": "answer"}
    row = RLHFDataset([of_another_trainer], tiny_tokenizer(), settings)[0]
    assert row["data_source"] == "unknown"
    assert row["reward_model"]["ground_truth"] == "3"


def test_rows_of_an_own_agent_loop_are_not_tried(tmp_path, caplog):
    """Such a loop may return `reward_score`; rows of ours need a reward function."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", "agent_name": "mine"}) + "\n")
    started(str(tmp_path / "rows.jsonl"))
    assert "reward check" not in caplog.text
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", "agent_name": "tool_agent"}) + "\n")
    with pytest.raises(ValueError, match=r"data_source 'unknown'.*custom_reward_function.path"):
        started(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    "spelled",
    [
        ["--reward-fn-key", "source", "--prompt-key", "question", "--ground-truth-key", "answer"],
        ["data.reward_fn_key=source", "data.prompt_key=question", "data.ground_truth_key=answer"],
    ],
)
def test_both_checks_take_the_same_arguments(tmp_path, spelled, capsys):
    file = tmp_path / "rows.jsonl"
    row = {"question": "1 + 1?", "answer": "2", "source": "openai/gsm8k"}
    file.write_text("".join(json.dumps(row | {"question": f"{n} + 1", "answer": str(n)}) + "\n" for n in range(9)))
    shared = ["--n", "4", "--seed", "1", "--samples", "0", "--max-prompt-length", "64"]
    assert check_data([str(file), *spelled, *shared]) == 0, capsys.readouterr()
    assert main([str(file), *spelled, *shared, *HERE]) == 0, capsys.readouterr()
    assert check_data([f"data.train_files={file}", *spelled, "--score-rows", "4"]) == 0
    assert main([f"data.train_files={file}", *spelled, "--score-rows", "4", *HERE]) == 0
    for check in (main, check_data):
        assert check(spelled) == 1
        assert "no data file is given" in capsys.readouterr().err
        assert check([str(file), "data.promt_key=question"]) == 1
        assert "data.prompt_key" in capsys.readouterr().err
