"""GSM8K answers: the number after `####`, compared as a number; every real ground truth scores 1, others less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.gsm8k import compute_score, extract_solution

DATA = Path(__file__).parents[5] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("6 * 12 = 72\n#### 72", "72", "72"),
        ("#### 1,234,567", "1234567", "1234567"),
        ("#### -3", "-3", "-3"),
        ("#### $1,000.50.", "1000.50", "1000.50"),
        ("#### -$5", "-5", "5"),
        ("#### 5\nno, wait\n#### 6", "6", "6"),
        ("the answer is 72.", None, "72"),
        ("#### 72\nno: ####", None, "72"),
        ("#### about 72", None, "72"),
        ("#### 72/3", None, "3"),
        ("#### 72 + 1", None, "1"),
        ("#### 5/hour", "5", "5"),
        ("#### 18%", "18", "18"),
        ("#### 1,2,3", None, "3"),
        ("#### --5", None, "-5"),
        ("####", None, None),
        ("", None, None),
        ("no number", None, None),
    ],
)
def test_the_answer_is_found(text, strict, flexible):
    assert extract_solution(text) == strict
    assert extract_solution(text, method="flexible") == flexible


def test_right_wrong_and_unreadable_answers_score_as_asked():
    assert compute_score("#### 72", "72") == 1.0
    assert compute_score("#### 72.0", "72") == 1.0
    assert compute_score("#### 1,000", "1000") == 1.0
    assert compute_score("#### 73", "72") == 0.0
    assert compute_score("#### 73", "72", format_score=0.1) == 0.1
    assert compute_score("it is 72", "72", format_score=0.1) == 0.0
    assert compute_score("it is 72", "72", method="flexible") == 1.0
    assert compute_score("#### 72", "72", score=5.0) == 5.0


def test_a_ground_truth_that_is_no_number_and_an_unknown_method_are_errors():
    with pytest.raises(ValueError, match=r"(?s)ground_truth.*'two'"):
        compute_score("#### 2", "two")
    with pytest.raises(ValueError, match=r"^method: 'loose' .*strict.*flexible"):
        extract_solution("#### 2", method="loose")


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.text(alphabet="ab #$\n", max_size=20))
def test_only_the_right_number_scores(number, off, before):
    assert compute_score(f"{before}#### {number:,}", str(number)) == 1.0
    assert compute_score(f"{before}#### {number + off:,}", str(number)) == 0.0


def test_every_number_at_once_is_not_an_answer():
    assert compute_score("#### " + " ".join(map(str, range(200))), "72") == 0.0
    assert compute_score("\n".join(f"#### {n}" for n in range(200)), "72") == 0.0


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gsm8k (openai/grade-school-math)")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_real_ground_truth_scores_one_and_a_changed_answer_less(split):
    for line in (DATA / f"{split}.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        truth = extract_solution(answer)
        assert truth is not None
        assert default_compute_score("openai/gsm8k", answer, truth) == 1.0
        assert default_compute_score("openai/gsm8k", f"#### {truth}", truth) == 1.0
        for wrong in (f"#### {truth}1", f"#### {float(truth) + 0.5}", answer.replace("####", ""), "", truth):
            assert default_compute_score("openai/gsm8k", wrong, truth) == 0.0
