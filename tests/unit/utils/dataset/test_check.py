"""The data check: what trains passes, what does not is named with its remedy and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from tiny import tiny_tokenizer

from verl.utils.dataset.check import check_files, main

GOOD = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_good_files_pass_as_a_command(tmp_path):
    file = write(tmp_path / "train.parquet", [GOOD, GOOD])
    command = [sys.executable, "-m", "verl.utils.dataset.check", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 rows" in done.stdout
    assert "'ground_truth': '2'" in done.stdout
    assert "2/2" in done.stdout
    assert "1 of 2 prompts repeat" in done.stdout
    assert "ok: these files train" in done.stdout


def test_every_problem_is_found_at_once(tmp_path, capsys):
    rows = [
        {**GOOD, "data_source": "unknown/set"},
        {**GOOD, "reward_model": {"style": "rule", "ground_truth": "two"}},
        {**GOOD, "prompt": []},
    ]
    assert main([write(tmp_path / "a.parquet", rows)]) == 1
    printed = capsys.readouterr().out
    assert "row 0: no reward function is known for data_source 'unknown/set'" in printed
    assert "row 1: the ground truth 'two' scores 0 against itself, not 1" in printed
    assert "row 2: 'prompt' has no messages" in printed
    assert "3 problems" in printed


def test_a_file_that_cannot_be_read_is_one_line_and_exit_code_1(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("{half")
    assert main([str(tmp_path / "a.jsonl")]) == 1
    assert "a.jsonl line 1: not valid JSON" in capsys.readouterr().err


def test_lengths_are_counted_with_the_models_tokenizer(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    report = check_files(str(tmp_path / "a.jsonl"), tokenizer=tiny_tokenizer(), max_prompt_length=5)
    assert report.lengths.tolist() == [len("1+1?") + 3]
    assert "1 prompts (100.0%) have more than 5 tokens" in report.notices[0]
    assert main([str(tmp_path / "a.jsonl"), "--model", str(tmp_path / "model")]) == 0


def test_a_reward_function_of_the_user_takes_any_source(tmp_path):
    file = write(tmp_path / "a.parquet", [{**GOOD, "data_source": "mine"}])
    assert check_files(file).problems
    assert not check_files(file, any_source=True).problems
