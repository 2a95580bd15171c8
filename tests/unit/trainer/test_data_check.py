"""The data check: what trains passes, what does not is named with file, row, cause and remedy, and an exit code."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.support.tiny import tiny_tokenizer
from verl.trainer.data_check import CheckReport, PromptLengths
from verl.trainer.data_check import check_data as check_files
from verl.trainer.data_check_command import main_data as main
from verl.trainer.data_check_command import show_report as show
from verl.utils.dataset import tokens

DAPO = Path(__file__).parents[4] / "shared" / "data" / "dapo_math_17k" / "dapo_math_17k.parquet"
GOOD = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def asking(*texts):
    return [{**GOOD, "prompt": text} for text in texts]


@pytest.mark.slow
def test_good_files_pass_as_a_command(tmp_path):
    file = write(tmp_path / "train.parquet", [GOOD, GOOD])
    command = [sys.executable, "-m", "verl.utils.dataset.check", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 rows" in done.stdout
    assert "'ground_truth': '2'" in done.stdout
    assert "2/2" in done.stdout
    assert "1 of 2 prompts repeat an earlier one of the same file" in done.stdout
    assert done.stdout.splitlines()[-1] == "ok: these files can be used for training"


def broken_parquet(path):
    write(path, [GOOD] * 50)
    path.write_bytes(path.read_bytes()[:-20])


BROKEN = {
    "truncated.parquet": (broken_parquet, r"truncated.parquet: it cannot be read .*Write it again"),
    "column.parquet": (
        lambda path: write(path, [{"question": "1+1?", "data_source": "gsm8k", "ground_truth": "2"}]),
        "column.parquet row 0: the column 'prompt' does not exist. Set data.prompt_key to the column",
    ),
    "types.parquet": (
        lambda path: write(path, [{**GOOD, "prompt": 7, "reward_model": "2"}] * 3),
        "types.parquet row 0 (and 2 more rows): 'prompt' is a int. Write it as text or as a list",
    ),
    "nulls.parquet": (
        lambda path: write(path, [GOOD, {**GOOD, "prompt": None}, {**GOOD, "prompt": None}]),
        "nulls.parquet row 1 (and 1 more row): 'prompt' is null. Fill it, or remove the row.",
    ),
    "empty.parquet": (
        lambda path: pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path),
        "empty.parquet: the file has no rows. Write it again, or remove it from the list of files.",
    ),
    "empty.jsonl": (lambda path: path.write_text(""), "empty.jsonl: the file has no rows."),
    "line.jsonl": (
        lambda path: path.write_text(json.dumps(GOOD) + "\n{half"),
        "line.jsonl line 2: not valid JSON (Expecting property name",
    ),
    "missing.parquet": (lambda path: None, "missing.parquet' (looked at "),
    "words.txt": (lambda path: path.write_text("x"), "words.txt: the format is not supported. Give one of .parquet"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_row_cause_and_remedy_beside_what_else_was_found(tmp_path, capsys, name):
    make, expected = BROKEN[name]
    make(tmp_path / name)
    good = write(tmp_path / "good.parquet", [GOOD])
    assert main([str(tmp_path / name), good]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    head, _, rest = expected.partition(" .*")
    assert head in printed
    assert rest in printed
    assert f"{good}: 1 rows" in printed
    assert re.search(r"openai/gsm8k │ \d+ │ gsm8k │ \d+/\d+", printed)  # the good file's rewards were still looked at


def test_every_problem_is_found_at_once(tmp_path, capsys):
    rows = [
        {**GOOD, "data_source": "unknown/set"},
        {**GOOD, "reward_model": {"style": "rule", "ground_truth": "two"}},
        {**GOOD, "prompt": []},
    ]
    assert main([write(tmp_path / "a.parquet", rows)]) == 1
    printed = capsys.readouterr().out
    assert "row 0: no reward function is known for data_source 'unknown/set'" in printed
    assert "row 1: the ground truth 'two' cannot be scored" in printed
    assert "row 2: 'prompt' has no messages" in printed
    assert "3 problems" in printed


def test_repeated_prompts_contradictions_and_leaks_are_told_apart(tmp_path):
    wrong = {**GOOD, "prompt": "a", "reward_model": {"style": "rule", "ground_truth": "3"}}
    train = write(tmp_path / "train.jsonl", [*asking("a", "b", "a"), wrong])
    test = write(tmp_path / "test.jsonl", asking("b", "c"))
    repeated, leaked, contradicted = check_files([train, test]).notices
    assert repeated.startswith("2 of 6 prompts repeat an earlier one of the same file (e.g. ")
    assert leaked.startswith("1 of 6 prompts are in two files")
    assert f"{test} line 1 and {train} line 2" in leaked
    assert contradicted.startswith("1 of 6 prompts repeat an earlier one with another ground truth")
    assert f"{train} line 4 and {train} line 1" in contradicted


def test_lengths_are_counted_with_the_models_tokenizer_and_held_against_the_limits(tmp_path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    file = write(tmp_path / "a.jsonl", asking("1+1?", "x" * 50))
    report = check_files(file, tokenizer=tiny_tokenizer(), limits=[5, 20])
    assert report.lengths.values.tolist() == [len("1+1?") + 3, 53]
    assert [notice[:27] for notice in report.notices] == ["2 prompts (100.0%) have mor", "1 prompts (50.0%) have more"]
    assert main([file, "--model", str(tmp_path / "model"), "--max-prompt-length", "5", "20"]) == 0
    printed = capsys.readouterr().out
    assert "over 5: 100.00%; over 20: 50.00%" in printed
    assert "<|user|>1+1?<|end|><|assistant|>" in printed  # as the model will see it


def test_the_check_leaves_the_tokens_for_the_training_that_follows(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "MIN_CACHED_ROWS", 0)
    check_files(write(tmp_path / "a.jsonl", [GOOD]), tokenizer=tiny_tokenizer())
    assert len(list((tmp_path / "cache" / "prompts").glob("*.arrow"))) == 1


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path, capsys):
    file = write(tmp_path / "a.parquet", [GOOD])
    assert main([file, "--model", str(tmp_path / "nowhere")]) == 1
    assert "--model: there is no" in capsys.readouterr().err


def test_a_prompt_that_the_models_template_refuses_is_a_problem(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    report = check_files(write(tmp_path / "a.jsonl", [GOOD]), tokenizer=tokenizer)
    assert "a.jsonl line 1: the chat template rejects the prompt" in report.problems[0]


def test_a_reward_function_of_the_user_takes_any_source(tmp_path):
    file = write(tmp_path / "a.parquet", [{**GOOD, "data_source": "mine"}])
    assert check_files(file).problems
    assert not check_files(file, any_source=True).problems


def test_rows_for_a_reward_model_need_no_function_but_say_what_to_set(tmp_path):
    judged = {**GOOD, "data_source": "pairs", "reward_model": {"style": "model", "ground_truth": "a fine answer"}}
    report = check_files(write(tmp_path / "a.parquet", [judged]))
    assert report.problems == []
    assert "rows of pairs are for a reward model: set reward_model.enable=True" in report.notices[0]
    mixed = check_files(write(tmp_path / "b.parquet", [judged, {**GOOD, "data_source": "pairs"}]))
    assert "b.parquet row 1: no reward function is known for data_source 'pairs'" in mixed.problems[0]


def test_rows_that_their_agent_scores_need_neither_function_nor_ground_truth(tmp_path):
    report = check_files(
        write(tmp_path / "a.parquet", [{**GOOD, "data_source": "game", "reward_model": {"style": "agent"}}])
    )
    assert (report.problems, report.sources["game"].function) == ([], "its agent")


def test_ground_truths_to_score_are_spread_evenly_over_each_source(tmp_path):
    rows = [{**GOOD, "reward_model": {"style": "rule", "ground_truth": str(i) if i < 9 else "bad"}} for i in range(10)]
    file = write(tmp_path / "a.jsonl", rows)
    assert check_files(file, scored_rows=2).sources["openai/gsm8k"].tried == 2
    assert "line 10: the ground truth 'bad'" in check_files(file, scored_rows=2).problems[0]
    assert check_files(file).sources["openai/gsm8k"].correct == 9


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 4000))
def test_the_bars_of_the_histogram_count_every_row_once(values, limit):
    console = Console(file=io.StringIO(), width=200)
    show(CheckReport(files=[("a", len(values))], lengths=PromptLengths(np.array(values), "tokens", [limit])), console)
    lines = console.file.getvalue().splitlines()
    bars = [line.split() for line in lines if line.endswith("%") and not line.startswith("prompt")]
    assert sum(int(bar[-2]) for bar in bars) == len(values)
    first = min(values)
    low, high = (bars[0][0].rstrip("+") + "-inf").split("-")[:2]
    assert int(low) <= first
    assert first <= float(high)


@pytest.mark.skipif(not DAPO.is_file(), reason="needs ../shared/data/dapo_math_17k (DAPO-Math-17k)")
def test_dapo_math_17k_trains_and_its_contradictory_problems_are_found(capsys):
    assert main([str(DAPO), "--score-rows", "500"]) == 0
    printed = capsys.readouterr().out
    assert "17917 rows" in printed
    assert "500/500" in printed
    assert "11 of 17917 prompts repeat an earlier one with another ground truth" in printed
    assert "ok: these files can be used for training" in printed
