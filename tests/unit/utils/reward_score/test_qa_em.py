"""Short answers between tags: exact match, contained match, F1, and the score for the format."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.qa_em import (
    compute_score,
    compute_score_em,
    compute_score_f1,
    compute_score_subem,
    extract_solution,
    f1_score,
    normalize_answer,
)


def test_the_last_whole_answer_counts_and_not_what_was_retrieved():
    assert extract_solution("<answer>Paris</answer> or <answer> Rome </answer>") == "Rome"
    assert extract_solution("<answer>Paris</answer> or <answer>Rome") == "Paris"
    assert extract_solution("<information><answer>Rome</answer></information>") is None
    assert extract_solution("<information>x</information><answer>Paris</answer><information>y") == "Paris"
    assert extract_solution("Paris") is None


@pytest.mark.parametrize("truth", ["Paris", ["Rome", "Paris"], {"target": ["Paris"]}, {"target": "Paris"}])
def test_ground_truths_may_be_written_in_every_usual_form(truth):
    assert compute_score_em("<answer>the PARIS.</answer>", truth) == 1.0
    assert compute_score_em("<answer>London</answer>", truth) == 0.0


def test_arrays_of_golden_answers_are_lists():
    assert compute_score_em("<answer>b</answer>", {"target": np.array(["a1", "b"], dtype=object)}) == 1.0


def test_right_wrong_and_missing_answers_score_as_asked():
    assert compute_score("<answer>Paris</answer>", "Paris", 0.1, 2.0) == 2.0
    assert compute_score("<answer>Rome</answer>", "Paris", 0.1, 2.0) == 0.1
    assert compute_score("Paris", "Paris", 0.1, 2.0) == 0.0
    assert compute_score_subem("<answer>It is Paris, France</answer>", "Paris") == 1.0
    assert compute_score_subem("<answer>Parisians</answer>", "Paris", format_score=0.1) == 0.1
    assert compute_score_subem("Paris", "Paris") == 0.0


def test_f1_is_the_overlap_of_words():
    # found: {city, of, paris}; wanted: {paris}; precision 1/3, recall 1 -> F1 = 2 * 1 / (3 + 1)
    assert compute_score_f1("<answer>the city of Paris</answer>", "Paris") == 0.5
    assert compute_score_f1("<answer>Rome</answer>", "Paris", format_score=0.1) == 0.1
    assert compute_score_f1("Paris", "Paris", format_score=0.1) == 0.0
    assert f1_score("Paris", ["London", "Paris"]) == 1.0
    assert f1_score("", "Paris") == 0.0


def test_an_answer_that_is_only_an_article_is_compared_as_it_is():
    assert compute_score_em("<answer>a</answer>", "A") == 1.0
    assert compute_score_em("<answer>the</answer>", "A") == 0.0
    assert compute_score_em("<answer></answer>", ["", "A"]) == 0.0
    assert compute_score_subem("<answer>b</answer>", "A") == 0.0
    assert f1_score("the", "A") == 0.0


def test_no_golden_answer_is_an_error():
    for empty in ([], {"target": []}, {}, None, "", [""]):
        with pytest.raises(ValueError, match=r"^ground_truth: .*\{'target': \[texts\]\}"):
            compute_score_em("<answer>x</answer>", empty)


WORDS = st.lists(st.sampled_from(["the", "A", "Paris", "paris.", "of", "+", "é"]), max_size=4).map(" ".join)


@given(WORDS, WORDS)
def test_normalising_is_idempotent_and_exact_match_is_the_highest_f1(one, other):
    assert normalize_answer(normalize_answer(one)) == normalize_answer(one)
    if other.strip():
        exact = compute_score_em(f"<answer>{one}</answer>", other)
        assert exact <= f1_score(one, other) <= 1.0
