"""Scores of answers in a file: the reward functions of training, mean@n and pass@k per data source."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.trainer.main_eval import main, run_eval
from verl.utils.dataset.problems import DataError
from verl.workers.reward_manager.naive import RewardError

HERE = {"reward_kwargs": {"num_processes": 0}}

# The command sets up logging.
pytestmark = pytest.mark.usefixtures("logging_as_before")


def row(truth, *answers, source="openai/gsm8k"):
    return {"data_source": source, "reward_model": {"ground_truth": truth}, "responses": list(answers)}


@pytest.fixture
def answers(tmp_path):
    rows = [
        row("4", "#### 4", "#### 5"),
        row("6", "none", "#### 7"),
        row("4", r"\boxed{4}", "#### 4", source="math_dapo"),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "answers.parquet")
    return tmp_path / "answers.parquet"


def test_sources_get_their_mean_and_their_chance_of_a_right_answer(answers, tmp_path, capsys):
    out = tmp_path / "metrics.json"
    metrics = run_eval({"data": {"path": str(answers), "output_path": str(out)}, "reward_model": HERE})
    gsm8k = metrics["openai/gsm8k"]["reward"]
    assert (gsm8k["mean@2"], gsm8k["pass@1"], gsm8k["pass@2"]) == (0.25, 0.25, 0.5)
    assert json.loads(out.read_text()) == metrics
    told = capsys.readouterr().out
    assert "openai/gsm8k" in told
    assert "pass@2" in told
    assert "0.500" in told


def test_a_function_of_the_user_scores_any_source_and_its_fields_are_measured(answers, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(len(solution_str)), 'acc': float(solution_str.endswith(str(ground_truth)))}\n"
    )
    custom = {"path": str(tmp_path / "mine.py"), "name": "score"}
    metrics = run_eval({"data": {"path": str(answers)}, "custom_reward_function": custom, "reward_model": HERE})
    assert metrics["math_dapo"]["acc"]["mean@2"] == 0.5
    assert metrics["math_dapo"]["reward"]["mean@2"] == 7.5


def test_an_answer_that_cannot_be_scored_costs_itself_or_the_run(answers, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(solution_str, ground_truth):\n    return 1 / (solution_str != 'none')\n"
    )
    custom = {"path": str(tmp_path / "mine.py"), "name": "score"}
    config = {"data": {"path": str(answers)}, "custom_reward_function": custom}
    assert run_eval({**config, "reward_model": HERE})["openai/gsm8k"]["reward"]["mean@2"] == 0.75
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        run_eval({**config, "reward_model": {**HERE, "on_error": "fail"}})


def test_the_ground_truth_may_be_another_column(tmp_path):
    rows = [{"data_source": "openai/gsm8k", "answer": "4", "responses": ["#### 4", "#### 5"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = {"path": str(tmp_path / "a.parquet")}
    with pytest.raises(DataError, match=r"data\.ground_truth_key"):
        run_eval({"data": data, "reward_model": HERE})
    metrics = run_eval({"data": {**data, "ground_truth_key": "answer"}, "reward_model": HERE})
    assert metrics["openai/gsm8k"]["reward"]["mean@2"] == 0.5


def test_files_without_answers_or_rewards_are_refused(answers, tmp_path):
    with pytest.raises(DataError, match=r"answers\.parquet row 0 .*'output'.*data\.response_key"):
        run_eval({"data": {"path": str(answers), "response_key": "output"}})
    pq.write_table(pa.Table.from_pylist([row("4", "x", source="unheard of")]), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"other\.parquet row 0: .*'unheard of'"):
        run_eval({"data": {"path": str(tmp_path / "other.parquet")}})


def test_the_command_scores_in_processes_and_a_wrong_key_is_told(answers, monkeypatch, capsys):
    given = [f"data.path={answers}", "reward_model.reward_kwargs.num_processes=1"]
    monkeypatch.setattr(sys, "argv", ["main_eval", *given])
    main()
    assert "openai/gsm8k" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["main_eval", *given, "data.respnse_key=x"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "Did you mean data.response_key?" in capsys.readouterr().err
