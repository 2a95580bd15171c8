"""Reward check: is a reward function fast and deterministic, and does it distinguish right from wrong answers?

It is called with answers whose correctness is known (`verl.utils.reward_score.calls`), in the scorer processes that
training uses.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl.utils.reward_score.calls import correct_response, responses_with_all_answers
from verl.workers.reward_manager.scorer import Sample, Score

Submit = Callable[[Sample], "Future[Score]"]
FindingStatus = Literal["ok", "warning", "failed"]
RIGHT_ANSWERS = "ground truth as the answer"

_SLOW_SECONDS = 1.0
_MIN_CALLS = 6
# Rows whose answers are reported with their scores.
_SAMPLE_ROWS = 2
# Timeouts of the first call, which starts processes and imports modules.
_FIRST_CALL_SECONDS = 60.0
_FIRST_CALL_SECONDS_WITH_BUDGET = 10.0


@dataclass(frozen=True)
class RewardFinding:
    """The result of one check."""

    question: str
    answer: str
    verdict: FindingStatus


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer that was tried, and its score. `kind`: right, empty, or everything (every number at once)."""

    kind: str
    answer: str
    ground_truth: Any
    score: float


@dataclass
class RewardReport:
    """The results of all checks."""

    findings: list[RewardFinding] = field(default_factory=list)
    samples: list[ScoredAnswer] = field(default_factory=list)
    """Answers to the first rows with their scores."""
    fatal_error: str | None = None
    """Error message of the first sample, if no sample could be scored."""

    @property
    def failed(self) -> bool:
        return self.fatal_error is not None or any(finding.verdict == "failed" for finding in self.findings)

    @property
    def right_answers_verified(self) -> bool:
        """Whether right answers scored more than no answer."""
        return any(finding.question == RIGHT_ANSWERS and finding.verdict == "ok" for finding in self.findings)


@dataclass(frozen=True)
class RewardRow:
    """The arguments of the reward function for a row, except the response."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass
class _Case:
    """A response to a row, and its scores."""

    kind: Literal["right", "empty", "everything"]
    row: int
    sample: Sample
    scores: list[Score] = field(default_factory=list)

    @property
    def value(self) -> float:
        return self.scores[0].value


def check_reward(
    submit: Submit,
    rows: Sequence[RewardRow],
    *,
    is_user_function: bool,
    budget_seconds: float | None = None,
    quick: bool = False,
) -> RewardReport:
    """Check a reward function on rows; `submit` is that of a reward manager.

    `is_user_function`: its answer format and highest score are unknown, so findings that may be due to them are
    warnings. `budget_seconds` ends the check early. `quick` leaves out answers that are expensive to score.
    """
    report = RewardReport()
    cases = list(_cases(rows, is_user_function, quick, report))
    first_call = _FIRST_CALL_SECONDS if budget_seconds is None else _FIRST_CALL_SECONDS_WITH_BUDGET
    if not cases or not _first_call_returns(submit, cases[0].sample, first_call, report):
        return report
    clock = _TimeBudget(budget_seconds)
    seconds = _call_times(submit, [case for case in cases if case.kind == "right"] or cases, clock)
    cases = cases[: clock.affordable(seconds) // 2]
    for order in (cases, random.Random(0).sample(cases, len(cases))):
        for case, future in [(case, submit(case.sample)) for case in order]:
            if (score := clock.wait(future)) is not None:
                case.scores.append(score)
    scored = [case for case in cases if case.scores]
    if not scored:
        text = f"none of {len(cases)} answers was scored within the time budget"
        report.findings.append(RewardFinding("speed", text, "warning"))
        return report
    if all(case.scores[0].error is not None for case in scored):
        report.fatal_error = str(scored[0].scores[0].error)
    report.samples = [
        ScoredAnswer(case.kind, case.sample.solution_str, case.sample.ground_truth, case.value)
        for case in scored
        if case.row < _SAMPLE_ROWS and case.scores[0].error is None
    ]
    report.findings += [
        _check_failures(scored),
        _check_speed(seconds, unfinished=len(cases) - len(scored)),
        _check_determinism(scored),
        *_check_correctness([case for case in scored if case.scores[0].error is None], is_user_function),
    ]
    return report


def _cases(rows: Sequence[RewardRow], is_user_function: bool, quick: bool, report: RewardReport) -> Iterator[_Case]:
    errors = []
    others = [row.ground_truth for row in rows if isinstance(row.ground_truth, str) and len(row.ground_truth) < 20]
    for number, row in enumerate(rows):
        sample = Sample(row.data_source, "", row.ground_truth, row.extra_info)
        try:
            right = correct_response(row.data_source, row.ground_truth)
        except (ValueError, TypeError) as error:
            right = None
            errors.append(str(error))
        if right is None and is_user_function:
            right = str(row.ground_truth)
        if right is not None:
            yield _Case("right", number, replace(sample, solution_str=right))
        yield _Case("empty", number, sample)
        for text in responses_with_all_answers(row.data_source, row.ground_truth, others[:5])[: 1 if quick else 2]:
            yield _Case("everything", number, replace(sample, solution_str=text))
    if errors and not is_user_function:
        text = f"{len(errors)} of {len(rows)} are invalid: {errors[0]}"
        report.findings.append(RewardFinding("ground truths", text, "failed"))


def _first_call_returns(submit: Submit, sample: Sample, timeout: float, report: RewardReport) -> bool:
    """Make the first call, which is not timed, because it also starts processes."""
    try:
        submit(sample).result(timeout=timeout)
    except TimeoutError:
        text = f"the first call did not return within {timeout:g} s"
        report.findings.append(RewardFinding("speed", text, "warning"))
        return False
    return True


def _call_times(submit: Submit, cases: Sequence[_Case], clock: _TimeBudget) -> list[float]:
    """Seconds of sequential calls, until half of the budget is used or three calls have failed."""
    seconds: list[float] = []
    failed = 0
    for case in cases:
        start = time.perf_counter()
        score = clock.wait(submit(case.sample))
        if score is None:
            break
        seconds.append(time.perf_counter() - start)
        failed += score.error is not None
        if failed >= 3 or clock.half_used():
            break
    return seconds


def _check_failures(cases: Sequence[_Case]) -> RewardFinding:
    failed = [case for case in cases if case.scores[0].error is not None]
    if not failed:
        return RewardFinding("failed calls", f"none of {len(cases)}", "ok")
    case = failed[0]
    last_line = str(case.scores[0].error).splitlines()[-1]
    text = f"{len(failed)} of {len(cases)}; answer {case.sample.solution_str[:60]!r}: {last_line}"
    return RewardFinding("failed calls", text, "failed")


def _check_speed(seconds: Sequence[float], unfinished: int) -> RewardFinding:
    if unfinished or not seconds:
        return RewardFinding("speed", f"{unfinished} calls had not returned within the time budget", "warning")
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
    text = f"p50 {1000 * p50:.3g} ms, p99 {1000 * p99:.3g} ms, slowest {1000 * ordered[-1]:.3g} ms"
    return RewardFinding("speed", text, "warning" if p99 > _SLOW_SECONDS else "ok")


def _check_determinism(cases: Sequence[_Case]) -> RewardFinding:
    """Compare two scores of the same answer; the second was computed in another order of calls."""
    twice = [case for case in cases if len(case.scores) > 1]
    for case in twice:
        first, second = case.scores[:2]
        if first.value != second.value:
            text = f"no: {case.sample.solution_str[:60]!r} scored {first.value:g}, then {second.value:g}"
            return RewardFinding("same answer, same score", text, "failed")
    return RewardFinding("same answer, same score", f"yes, {len(twice)} answers twice, in another order", "ok")


def _check_correctness(cases: Sequence[_Case], is_user_function: bool) -> Iterator[RewardFinding]:
    right = {case.row: case for case in cases if case.kind == "right"}
    if right:
        yield _check_right_answers(list(right.values()), cases, is_user_function)
    names: dict[str, str] = {"empty": "empty answer", "everything": "answer with every number"}
    for kind, question in names.items():
        tried = [case for case in cases if case.kind == kind]
        highest = max(tried, key=lambda case: case.value, default=None)
        if highest is None:
            continue
        # The full score is that of the right answer, if it is positive.
        wrongly_full = [case for case in tried if case.value > 0 and case.value >= _full_score(right.get(case.row))]
        text = f"scores {highest.value:g} at most"
        if wrongly_full:
            first = wrongly_full[0]
            text = f"gets full score ({first.value:g}) in {len(wrongly_full)} of {len(tried)}: {_describe(first)}"
        elif kind == "empty" and highest.value > 0:
            yield RewardFinding(question, text, "warning" if is_user_function else "failed")
            continue
        yield RewardFinding(question, text, "failed" if wrongly_full else "ok")


def _full_score(right: _Case | None) -> float:
    return right.value if right is not None and right.value > 0 else float("inf")


def _check_right_answers(right: Sequence[_Case], cases: Sequence[_Case], is_user_function: bool) -> RewardFinding:
    question = RIGHT_ANSWERS
    if not is_user_function:
        wrong = [case for case in right if case.value != 1.0]
        if not wrong:
            return RewardFinding(question, f"scores 1 in all {len(right)} rows", "ok")
        text = f"scores {wrong[0].value:g} in {len(wrong)} of {len(right)} rows: {_describe(wrong[0])}"
        return RewardFinding(question, text, "failed")
    empty = {case.row: case.value for case in cases if case.kind == "empty"}
    no_better = [case for case in right if case.value <= empty.get(case.row, 0.0)]
    if not no_better:
        return RewardFinding(question, f"scores {min(case.value for case in right):g} at least", "ok")
    text = (
        f"scores no better than no answer in {len(no_better)} of {len(right)} rows: {_describe(no_better[0])}. If the "
        "function expects another format, declare it: register_score(data_source, answer=…)"
    )
    return RewardFinding(question, text, "warning")


def _describe(case: _Case) -> str:
    return f"answer {case.sample.solution_str[:60]!r}, ground truth {str(case.sample.ground_truth)[:60]!r}"


class _TimeBudget:
    """The remaining time of the check."""

    def __init__(self, budget: float | None) -> None:
        self._start = time.monotonic()
        self._budget = budget

    def half_used(self) -> bool:
        return self._budget is not None and time.monotonic() - self._start > self._budget / 2

    def affordable(self, seconds: Sequence[float]) -> int:
        """The number of calls of these durations (none: unknown) that fit into the remaining time; at least
        `_MIN_CALLS`."""
        if self._budget is None:
            return sys.maxsize
        if not seconds:
            return _MIN_CALLS
        left = max(0.0, self._start + self._budget - time.monotonic())
        return max(_MIN_CALLS, int(left / (sum(seconds) / len(seconds))))

    def wait(self, future: Future[Score]) -> Score | None:
        """The score, or None when the budget is used up. Without a budget, the pool's timeout applies."""
        left = None if self._budget is None else max(0.0, self._start + self._budget - time.monotonic())
        try:
            return future.result(timeout=left)
        except TimeoutError:
            return None
