"""Every case made from the forms of `scorer_forms` gets the verdict that follows from how it was made."""

from __future__ import annotations

import pytest

from tests.support.scorer_forms import HELD_OUT, INSPECTED, SOURCES, cases, forms


@pytest.mark.parametrize("scorer", SOURCES)
def test_every_case_is_judged_as_it_was_made(scorer):
    if scorer == "math":
        pytest.importorskip("math_verify", reason="needs math-verify (pip install math-verify)")
    wrongly = [case for case in cases(scorer) if not case.is_scored_correctly()]
    assert [(case.text, case.truth) for case in wrongly if not case.form.limit] == []
    # A limit that is one no more must be taken off the list, here and in docs/guides/rewards.md.
    assert {case.form.template for case in wrongly} == {form.template for form in forms(scorer) if form.limit}


@pytest.mark.parametrize("scorer", SOURCES)
def test_there_are_enough_cases_of_each_kind_in_each_half(scorer):
    made = cases(scorer)
    for part in (INSPECTED, HELD_OUT):
        for is_correct in (True, False):
            assert sum(case.part == part and case.is_correct is is_correct for case in made) >= 80
    assert len(made) >= 300
    assert not any("<t>" in case.text for case in made)
