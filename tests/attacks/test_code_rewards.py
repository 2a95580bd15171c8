"""All exploits of code rewards score 0, in the real sandbox; valid solutions keep their score."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.code_rewards.exploits import Exploit, exploits
from tests.support.code_rewards.forgeries import FORGERIES
from tests.support.code_rewards.solutions import CASES, Case
from verl.sandbox import REQUIRE, available
from verl.sandbox.code_runner import CodeSettings
from verl.utils.reward_score.code import compute_score

SETTINGS = CodeSettings(require=min(("files", available().level), key=REQUIRE.index), wall_s=8, memory_mb=512)
EXPLOIT_SETTINGS = replace(SETTINGS, wall_s=5)


@pytest.mark.slow
@pytest.mark.parametrize("exploit", exploits(), ids=str)
def test_an_exploit_scores_0(exploit: Exploit) -> None:
    result = compute_score(exploit.answer, exploit.ground_truth, timeout=1, settings=EXPLOIT_SETTINGS)
    assert (result["score"], result["forgeable"]) == (0.0, 0), result


@pytest.mark.slow
@pytest.mark.parametrize("case", FORGERIES, ids=str)
def test_a_forgery_scores_0(case: Case) -> None:
    result = compute_score(case.answer, case.ground_truth, settings=SETTINGS)
    assert (result["score"], result["forgeable"]) == (0.0, 0), result


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_solution_keeps_its_score(case: Case) -> None:
    result = compute_score(case.answer, case.ground_truth, settings=SETTINGS)
    assert (result["score"], result["forgeable"]) == (case.score, case.forgeable), result
