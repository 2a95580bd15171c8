"""Real data: every ground truth in `../shared/data` scores 1.0 as the answer in the right format, changed ones less."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from verl.utils.reward_score import default_compute_score, score_function
from verl.utils.reward_score.calls import check_ground_truth, responses_with_all_answers

DATA = Path(__file__).parents[5] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data (see its README for the sources)")

# Rows of MATH whose answer is missing in the file.
WITHOUT_ANSWER = {886, 1009, 5328, 5330}


def truths(name: str) -> tuple[str, list]:
    """Data source and distinct ground truths of a file."""
    if name == "gsm8k":
        lines = (DATA / "gsm8k" / "train.jsonl").read_text() + (DATA / "gsm8k" / "test.jsonl").read_text()
        answers = [json.loads(line)["answer"].rpartition("#### ")[2] for line in lines.splitlines()]
        return "openai/gsm8k", sorted(set(answers))
    if name == "dapo":
        pq = pytest.importorskip("pyarrow.parquet")
        table = pq.read_table(DATA / "dapo_math_17k" / "dapo_math_17k.parquet")
        (source,) = set(table.column("data_source").to_pylist())
        return source, sorted({row["ground_truth"] for row in table.column("reward_model").to_pylist()})
    if name == "hotpot":
        lines = (DATA / "hotpot_search" / "questions.jsonl").read_text().splitlines()
        return "searchR1_hotpotqa", [{"target": json.loads(line)["golden_answers"]} for line in lines]
    if name == "train_math":
        rows = json.loads((DATA / "math" / "train_math.json").read_text())
        assert {number for number, row in enumerate(rows) if not row["answer"]} == WITHOUT_ANSWER
        return "DigitalLearningGmbH/MATH-lighteval", sorted({row["answer"] for row in rows if row["answer"]})
    lines = (DATA / "math" / f"{name}.jsonl").read_text().splitlines()
    source = {"math500": "HuggingFaceH4/MATH-500", "aime24": "aime_2024"}[name]
    return source, sorted({str(json.loads(line)["answer"]) for line in lines})


def score(source: str, text: str, truth: object) -> float:
    told = default_compute_score(source, text, truth)
    return told["score"] if isinstance(told, dict) else told


FILES = ["gsm8k", "train_math", "math500", "aime24", "dapo", "hotpot"]


@pytest.mark.parametrize("name", FILES)
def test_every_ground_truth_scores_one_against_itself(name):
    source, answers = truths(name)
    assert len(answers) >= 20
    wrong = {str(truth): check.problem for truth in answers if (check := check_ground_truth(source, truth)).problem}
    assert not wrong


@pytest.mark.parametrize("name", FILES)
def test_changed_answers_score_less(name):
    source, answers = truths(name)
    make = score_function(source).answer
    for truth in random.Random(0).sample(answers, 20):
        plain = truth["target"][0] if isinstance(truth, dict) else truth
        for text in ["", plain, make(f"{plain}7"), make(_changed(plain)), *responses_with_all_answers(source, truth)]:
            assert score(source, text, truth) == 0.0, (text, truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", *(f"train_math:{part}" for part in range(4)), "math500", "aime24", "dapo"])
def test_every_changed_answer_scores_less(name):
    name, _, part = name.partition(":")
    source, answers = truths(name)
    make = score_function(source).answer
    for truth in answers[int(part) :: 4] if part else answers:
        assert score(source, make(_changed(truth)), truth) == 0.0, truth


def _changed(answer: str) -> str:
    if r"\approx" in answer:  # `2/3 ≈ 0.67 + 1` still says 2/3
        return "1"
    return f"{answer}+1"
