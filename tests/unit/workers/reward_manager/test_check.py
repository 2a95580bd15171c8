"""The reward check tells good reward functions from bad ones, and says what is wrong with them."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future

import pytest

from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import ScorerPool
from verl.workers.reward_manager.check import RewardRow, check_reward
from verl.workers.reward_manager.scorer import Sample, Score

ROWS = [RewardRow("openai/gsm8k", str(truth), {}) for truth in (72, 5, 18, 1000, 3, 40)]


def verdicts(compute, rows=ROWS, **options):
    """Question -> verdict, with the function called here, in this process."""
    with ScorerPool(compute, processes=0, timeout=60.0) as pool:
        report = check_reward(pool.submit, rows, **{"is_user_function": True, **options})
    return report, {finding.question: finding.verdict for finding in report.findings}


@pytest.mark.slow
def test_our_functions_pass_in_scorer_processes():
    rows = [
        *ROWS,
        RewardRow("math", r"\frac{1}{2}", {}),
        RewardRow("math_dapo", "34", {}),
        RewardRow("hotpotqa", {"target": ["Paris", "Paris, France"]}, {}),
        RewardRow("countdown", {"target": 98, "numbers": [44, 19, 35]}, {}),
        RewardRow("mmlu", "B", {"choices": ["Rome", "Paris"]}),
    ]
    with ScorerPool(default_compute_score, processes=1, timeout=60.0) as pool:
        report = check_reward(pool.submit, rows, is_user_function=False)
    assert {finding.verdict for finding in report.findings if finding.question != "speed"} == {"ok"}, report
    assert len(report.findings) == 6
    assert not report.failed


def test_a_function_that_takes_any_mention_for_an_answer_fails():
    def contains(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)

    report, verdict_of = verdicts(contains)
    assert verdict_of["answer with every number"] == "failed"
    assert verdict_of["ground truth as the answer"] == verdict_of["empty answer"] == "ok"
    assert report.failed
    assert "gets full score (1)" in report.findings[-1].answer


def test_a_function_that_depends_on_order_fails():
    calls = itertools.count()

    def moody(data_source, solution_str, ground_truth, extra_info):
        return next(calls) % 7 / 7

    report, verdict_of = verdicts(moody)
    assert verdict_of["same answer, same score"] == "failed"
    assert report.failed


def test_a_function_that_rewards_silence_is_doubted_and_one_that_prefers_it_fails():
    def short(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if solution_str == f"#### {ground_truth}" else 0.1 if not solution_str else 0.0

    assert verdicts(short)[1]["empty answer"] == "warning"
    assert verdicts(short, is_user_function=False)[1]["empty answer"] == "failed"

    def silent(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if not solution_str or solution_str == f"#### {ground_truth}" else 0.0

    assert verdicts(silent)[1]["empty answer"] == "failed"


def test_a_function_with_a_format_of_its_own_is_only_doubted():
    def own_format(data_source, solution_str, ground_truth, extra_info):
        return float(solution_str == f"result={ground_truth}")

    report, verdict_of = verdicts(own_format)
    assert verdict_of["ground truth as the answer"] == "warning"
    assert not report.failed
    assert not report.right_answers_verified
    report, verdict_of = verdicts(own_format, is_user_function=False)
    assert verdict_of["ground truth as the answer"] == "failed"


def test_failing_calls_are_counted_and_shown_and_no_score_at_all_is_fatal():
    def sometimes(data_source, solution_str, ground_truth, extra_info):
        return 1 / len(solution_str)

    report, verdict_of = verdicts(sometimes)
    assert verdict_of["failed calls"] == "failed"
    assert "ZeroDivisionError" in report.findings[0].answer
    assert report.fatal_error is None

    def never(data_source, solution_str, ground_truth, extra_info):
        raise KeyError("answer")

    report, _ = verdicts(never)
    assert "KeyError: 'answer'" in report.fatal_error
    assert report.failed


def test_ground_truths_that_cannot_be_compared_with_are_told():
    report, verdict_of = verdicts(default_compute_score, [*ROWS, RewardRow("math", "", {})], is_user_function=False)
    assert verdict_of["ground truths"] == "failed"
    assert "is empty" in report.findings[0].answer


@pytest.mark.timeout(60)
def test_a_budget_ends_the_check_whatever_the_function_does():
    def slow(data_source, solution_str, ground_truth, extra_info):
        time.sleep(0.05 if solution_str.endswith("72") else 3600)
        return 1.0

    with ScorerPool(slow, processes=1, timeout=3600.0) as pool:
        report = check_reward(pool.submit, ROWS, is_user_function=True, budget_seconds=0.5)
    assert [finding.verdict for finding in report.findings if finding.question == "speed"] == ["warning"]


def test_few_calls_are_submitted_if_none_after_the_first_returns():
    submitted: list[Sample] = []

    def submit(sample: Sample) -> Future[Score]:
        submitted.append(sample)
        future: Future[Score] = Future()
        if len(submitted) == 1:
            future.set_result(Score(1.0))
        return future

    report = check_reward(submit, ROWS * 8, is_user_function=True, budget_seconds=0.1)
    assert len(submitted) == 1 + 1 + 6, "the first call, a timed call, and the smallest check"
    assert [(finding.question, finding.verdict) for finding in report.findings] == [("speed", "warning")]
