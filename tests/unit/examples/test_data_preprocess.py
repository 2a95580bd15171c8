"""The preprocessing scripts: rows in the schema, every ground truth worth 1.0 by the reward its data source names."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.tiny import tiny_tokenizer
from verl.utils.dataset.check import check_files
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score, known_data_sources, score_function

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "data_preprocess"
SHARED = ROOT.parent / "shared" / "data"
SLICE = 40


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as `python SCRIPT …` would; its files as lists of rows."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, "--local_save_dir", str(tmp_path / "out"), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(SCRIPTS))
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
        return {file.stem: pq.read_table(file).to_pylist() for file in (tmp_path / "out").glob("*.parquet")}

    return run


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sliced(source, target):
    """The first rows of every file of a shared folder, in a folder of the same layout."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".parquet":
            pq.write_table(pq.read_table(file).slice(0, SLICE), target / file.name)
        elif file.suffix == ".json":
            (target / file.name).write_text(json.dumps(json.loads(file.read_text())[:SLICE]))
        else:
            with file.open() as lines:
                (target / file.name).write_text("".join(itertools.islice(lines, SLICE)))
    return target


MATH_SOURCES = {"lighteval/MATH", "HuggingFaceH4/MATH-500", "aime24"}
REAL = {
    "gsm8k": ("gsm8k", {"train": 40, "test": 40}, {"openai/gsm8k"}),
    "math_dataset": ("math", {"train": 40, "test": 40, "aime24": 30}, MATH_SOURCES),
    "dapo_math": ("dapo_math_17k", {"train": 40}, {"math_dapo"}),
    "hotpotqa_search": ("hotpot_search", {"train": 36, "test": 4}, {"hotpotqa"}),
    "ultrafeedback": ("ultrafeedback", {"train": 40, "test": 40}, {"ultrafeedback"}),
    "hh_rlhf": ("ultrafeedback", {"train": 40, "test": 40}, {"raw"}),
}  # fmt: skip


@pytest.mark.parametrize("script", REAL)
def test_real_data_becomes_rows_that_train_and_whose_ground_truths_score_one(tmp_path, run, script):
    folder, counts, sources = REAL[script]
    if not (SHARED / folder).is_dir():
        pytest.skip(f"needs ../shared/data/{folder}; its README says where it comes from")
    made = run(script, "--local_dataset_path", sliced(SHARED / folder, tmp_path / "raw"))
    assert {split: len(rows) for split, rows in made.items()} == counts
    assert {row["data_source"] for rows in made.values() for row in rows} == sources
    by_rule = script not in ("ultrafeedback", "hh_rlhf")
    for split in made:
        file = str(tmp_path / "out" / f"{split}.parquet")
        report = check_files(file, any_source=not by_rule)
        assert report.problems == []
        assert all(source.correct == source.tried for source in report.sources.values())
        assert sum(source.tried for source in report.sources.values()) == (len(made[split]) if by_rule else 0)
        dataset = RLHFDataset(file, tiny_tokenizer(), {"max_prompt_length": 8192})
        dataset.validate(data_sources=known_data_sources() if by_rule else None)
        assert dataset[0]["extra_info"]["split"] == split


@pytest.mark.parametrize(("script", "shown"), [("math_dataset", "\\boxed"), ("dapo_math", "Answer:")])
def test_the_prompt_asks_for_the_format_that_the_reward_reads(tmp_path, run, script, shown):
    write_lines(
        tmp_path / "raw" / "train.jsonl", [DAPO_ROW if script == "dapo_math" else {"problem": "1+1?", "answer": "2"}]
    )
    (row,) = run(script, "--local_dataset_path", tmp_path / "raw")["train"]
    assert shown in row["prompt"][0]["content"]
    assert shown in score_function(row["data_source"]).answer("2")


DAPO_ROW = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}}


def test_dapo_problems_come_once_and_contradictory_ones_not_at_all(tmp_path, run, capsys):
    other = {**DAPO_ROW, "prompt": [{"role": "user", "content": "2+2? Answer: your result"}]}
    contradicting = {**other, "prompt": [{"role": "user", "content": "3+3?"}]}
    raw = [DAPO_ROW, other, DAPO_ROW, contradicting, {**contradicting, "reward_model": {"ground_truth": "6"}}]
    write_lines(tmp_path / "raw.jsonl", raw)
    rows = run("dapo_math", "--local_dataset_path", tmp_path / "raw.jsonl")["train"]
    assert [(row["extra_info"]["index"], row["reward_model"]["ground_truth"]) for row in rows] == [(0, "2"), (1, "2")]
    assert rows[1]["prompt"][0]["content"] == "2+2? Answer: your result"
    assert "1 problems with contradictory answers left out" in capsys.readouterr().out


def test_math_answers_may_be_boxed_in_the_solution_and_sets_that_are_absent_are_left_out(tmp_path, run, capsys):
    raw = [
        {"problem": "1/2?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
        {"problem": "?", "answer": None},
    ]
    write_lines(tmp_path / "raw" / "train.jsonl", raw)
    made = run("math_dataset", "--local_dataset_path", tmp_path / "raw")
    assert list(made) == ["train"]
    assert made["train"][0]["reward_model"]["ground_truth"] == "\\frac{1}{2}"
    assert made["train"][0]["extra_info"]["level"] == "Level 1"
    printed = capsys.readouterr().out
    assert "1 rows, 1 without an answer left out" in printed
    assert "aime24.parquet is left out" in printed


def test_questions_come_with_their_own_splits_or_every_tenth_is_kept_for_the_test(tmp_path, run):
    questions = [{"id": str(i), "question": f"{i}?", "golden_answers": ["a", "b"]} for i in range(21)]
    write_lines(tmp_path / "raw" / "questions.jsonl", questions)
    made = run("hotpotqa_search", "--local_dataset_path", tmp_path / "raw")
    assert [row["extra_info"]["id"] for row in made["test"]] == ["0", "10", "20"]
    assert len(made["train"]) == 18
    assert made["train"][0]["reward_model"]["ground_truth"] == {"target": ["a", "b"]}
    write_lines(tmp_path / "raw" / "train.jsonl", questions[:2])
    write_lines(tmp_path / "raw" / "dev.jsonl", questions[2:3])
    made = run("hotpotqa_search", "--local_dataset_path", tmp_path / "raw")
    assert (len(made["train"]), len(made["test"])) == (2, 1)


def test_preference_pairs_keep_both_answers_and_equal_ones_are_left_out(tmp_path, run):
    pair = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}
    write_lines(tmp_path / "raw" / "train.jsonl", [pair, {**pair, "rejected": "Hello."}])
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    as_chat = {"prompt": "Hi?", "chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "No."}]}
    write_lines(tmp_path / "raw" / "test.jsonl", [as_chat])
    made = run("ultrafeedback", "--local_dataset_path", tmp_path / "raw")
    for rows in made.values():
        ((prompt, chosen, rejected),) = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
        assert (prompt, chosen, rejected) == ([{"role": "user", "content": "Hi?"}], "Hello.", "No.")
        assert rows[0]["reward_model"]["style"] == "model"


def test_countdown_puzzles_are_solvable_all_different_and_decided_by_the_seed(tmp_path, run):
    sizes = ["--train_size", 150, "--test_size", 50, "--numbers", 3, 4]
    made = run("countdown", *sizes)
    puzzles = [row["reward_model"]["ground_truth"] for rows in made.values() for row in rows]
    assert len({(tuple(sorted(one["numbers"])), one["target"]) for one in puzzles}) == 200
    assert {len(one["numbers"]) for one in puzzles} == {3, 4}
    for row in made["train"] + made["test"]:
        answer = f"<answer>{row['extra_info']['solution']}</answer>"
        assert default_compute_score("countdown", answer, row["reward_model"]["ground_truth"]) == 1.0
        assert str(row["reward_model"]["ground_truth"]["target"]) in row["prompt"][0]["content"]
    assert run("countdown", *sizes) == made
    assert run("countdown", *sizes, "--seed", 2) != made
    assert check_files(str(tmp_path / "out" / "test.parquet")).problems == []
    with pytest.raises(SystemExit, match=r"test_size"):
        run("countdown", "--numbers", 2, "--largest", 3)


def test_a_row_without_a_field_is_named_with_its_place(tmp_path, run):
    write_lines(tmp_path / "raw" / "train.jsonl", [{"question": "?", "answer": "#### 1"}, {"question": "?"}])
    with pytest.raises(SystemExit, match=r"train row 1: .*'answer' \(found: question\)"):
        run("gsm8k", "--local_dataset_path", tmp_path / "raw")


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_read_from_where_the_download_command_put_it(tmp_path):
    snapshot = tmp_path / "hub" / "datasets--org--name" / "snapshots" / "abc"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for split in ("train", "test"):
        (snapshot / "main").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"question": ["1+1?"], "answer": ["#### 2"]}), snapshot / "main" / f"{split}-0.parquet")
    files = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test"))
    (snapshot / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPTS / "gsm8k.py"), "--local_save_dir", str(tmp_path / "out"), "--hub_name"]
    done = subprocess.run([*command, "org/name"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "out" / "test.parquet").num_rows == 1
    missing = subprocess.run([*command, "org/missing"], env=env, capture_output=True, text=True)
    assert missing.returncode == 1
    assert "hf download --repo-type dataset org/missing" in missing.stderr
    assert "Traceback" not in missing.stderr
