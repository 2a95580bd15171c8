"""Multiple choice: one letter, however it is stated; several letters are no answer."""

from __future__ import annotations

import pytest

from verl.utils.reward_score.multiple_choice import compute_score, extract_solution

CHOICES = ["Rome", "Paris", "a dog"]


@pytest.mark.parametrize(
    "text",
    [
        "Answer: B",
        "**Answer:** (B)",
        "The answer is B.",
        "the correct answer is option B",
        "Answer: A\nwait\nAnswer: B",
        "Answer: B) Paris",
        "Answer: B. A dog",
        "Answer: B - Paris",
        "Answer:\n\n**B**",
        "So it must be (B).",
        "I think about it.\nB",
        "x\n(b)",
        r"\boxed{B}",
        r"\boxed{\text{B}}",
        r"\boxed{\textbf{(B) } Paris}",
        "<answer>B</answer>",
    ],
)
def test_a_stated_letter_is_found(text):
    assert extract_solution(text) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A B C D",
        "Answer: A B C D",
        "Answer: A, B, C, D",
        "Answer: A or B",
        "Answer: A/B",
        "Answer: B and C",
        "(A) or (B)",
        "A. Rome\nB. Paris",
        "(A) Rome\n(B) Paris",
        "The answer is a dog",
        "I am not sure",
        "Answer: Bob",
        r"\boxed{A, B}",
    ],
)
def test_several_letters_and_prose_are_no_answer(text):
    assert extract_solution(text) is None


def test_the_text_of_an_option_is_its_letter():
    assert extract_solution("The answer is Paris.", CHOICES) == "B"
    assert extract_solution("The answer is a dog", CHOICES) == "C"
    assert extract_solution("Paris", {"A": "Rome", "B": "Paris"}) == "B"
    assert extract_solution("Paris", {"label": ["A", "B"], "text": ["Rome", "Paris"]}) == "B"
    assert extract_solution("Paris", ["Paris", "paris"]) is None
    assert compute_score("Answer: paris", "B", extra_info={"choices": CHOICES}) == 1.0


def test_right_wrong_and_missing_letters_score_as_asked():
    assert compute_score("Answer: B", "B") == 1.0
    assert compute_score("Answer: B", " (b)") == 1.0
    assert compute_score("Answer: B", 1) == 1.0
    assert compute_score("Answer: C", "B", format_score=0.1) == 0.1
    assert compute_score("no idea", "B", format_score=0.1) == 0.0
    for wrong in ("Paris", 17, None, ""):
        with pytest.raises(ValueError, match=rf"^ground_truth {wrong!r} .*\bA to J\b"):
            compute_score("Answer: B", wrong)
