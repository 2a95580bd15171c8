"""Reward check: is the reward function fast, does it always say the same, and does it tell right from wrong?

It is tried on answers whose score is known beforehand (`verl.utils.reward_score.trial`), through the scorer processes
that training uses.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl.utils.reward_score.trial import EMPTY, everything, right_answer
from verl.workers.reward_manager.scorer import Sample, Score

Submit = Callable[[Sample], "Future[Score]"]
Verdict = Literal["ok", "warning", "failed"]

_SLOW_SECONDS = 1.0
_FEWEST_CALLS = 6
# The first call may have to start processes and import what the function needs.
_FIRST_CALL_SECONDS = 60.0
_FIRST_CALL_SECONDS_WITH_BUDGET = 10.0


@dataclass(frozen=True)
class Finding:
    """One question about the reward function, and its answer."""

    question: str
    answer: str
    verdict: Verdict


@dataclass
class RewardReport:
    """What was found; `hopeless`: no sample could be scored at all."""

    findings: list[Finding] = field(default_factory=list)
    hopeless: str | None = None

    @property
    def failed(self) -> bool:
        return self.hopeless is not None or any(finding.verdict == "failed" for finding in self.findings)


@dataclass(frozen=True)
class Row:
    """What the reward function is told of a row, less the answer."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass
class _Case:
    """An answer to a row, and the scores it got."""

    kind: Literal["right", "empty", "everything"]
    row: int
    sample: Sample
    scores: list[Score] = field(default_factory=list)

    @property
    def value(self) -> float:
        return self.scores[0].value


def check_reward(
    submit: Submit, rows: Sequence[Row], *, own_function: bool, budget_seconds: float | None = None, quick: bool = False
) -> RewardReport:
    """Try a reward function on rows; `submit` is a reward manager's.

    `own_function`: one of the user, whose answer format and highest score are not known; what may be due to that is a
    warning. `budget_seconds` ends the check early. `quick` leaves out formatted answers that need much thought.
    """
    report = RewardReport()
    cases = list(_cases(rows, own_function, quick, report))
    first_call = _FIRST_CALL_SECONDS if budget_seconds is None else _FIRST_CALL_SECONDS_WITH_BUDGET
    if not cases or not _answers_at_all(submit, cases[0].sample, first_call, report):
        return report
    clock = _Clock(budget_seconds)
    seconds = _timed(submit, [case for case in cases if case.kind == "right"] or cases, clock)
    cases = cases[: clock.affordable(seconds) // 2]
    for order in (cases, random.Random(0).sample(cases, len(cases))):
        for case, future in [(case, submit(case.sample)) for case in order]:
            if (score := clock.wait(future)) is not None:
                case.scores.append(score)
    scored = [case for case in cases if case.scores]
    if scored and all(case.scores[0].error is not None for case in scored):
        report.hopeless = str(scored[0].scores[0].error)
    report.findings += [
        _failures(scored),
        _speed(seconds, late=len(cases) - len(scored)),
        _sameness(scored),
        *_judgement([case for case in scored if case.scores[0].error is None], own_function),
    ]
    return report


def _cases(rows: Sequence[Row], own_function: bool, quick: bool, report: RewardReport) -> Iterator[_Case]:
    broken = []
    others = [row.ground_truth for row in rows if isinstance(row.ground_truth, str) and len(row.ground_truth) < 20]
    for number, row in enumerate(rows):
        sample = Sample(row.data_source, EMPTY, row.ground_truth, row.extra_info)
        try:
            right = right_answer(row.data_source, row.ground_truth)
        except (ValueError, TypeError) as error:
            right = None
            broken.append(str(error))
        if right is None and own_function:
            right = str(row.ground_truth)
        if right is not None:
            yield _Case("right", number, replace(sample, solution_str=right))
        yield _Case("empty", number, sample)
        for text in everything(row.data_source, row.ground_truth, others[:5])[: 1 if quick else 2]:
            yield _Case("everything", number, replace(sample, solution_str=text))
    if broken and not own_function:
        text = f"{len(broken)} of {len(rows)} cannot be compared with: {broken[0]}"
        report.findings.append(Finding("ground truths", text, "failed"))


def _answers_at_all(submit: Submit, sample: Sample, patience: float, report: RewardReport) -> bool:
    """The first call, whose time is not the function's alone."""
    try:
        submit(sample).result(timeout=patience)
    except TimeoutError:
        text = f"the first call did not return within {patience:g} s"
        report.findings.append(Finding("speed", text, "warning"))
        return False
    return True


def _timed(submit: Submit, cases: Sequence[_Case], clock: _Clock) -> list[float]:
    """Seconds of one call after the other; half of the time there is, or until three have failed."""
    seconds: list[float] = []
    failed = 0
    for case in cases:
        start = time.perf_counter()
        score = clock.wait(submit(case.sample))
        if score is None:
            break
        seconds.append(time.perf_counter() - start)
        failed += score.error is not None
        if failed >= 3 or clock.half_gone():
            break
    return seconds


def _failures(cases: Sequence[_Case]) -> Finding:
    failed = [case for case in cases if case.scores[0].error is not None]
    if not failed:
        return Finding("failed calls", f"none of {len(cases)}", "ok")
    case = failed[0]
    last_line = str(case.scores[0].error).splitlines()[-1]
    text = f"{len(failed)} of {len(cases)}; answer {case.sample.solution_str[:60]!r}: {last_line}"
    return Finding("failed calls", text, "failed")


def _speed(seconds: Sequence[float], late: int) -> Finding:
    if late or not seconds:
        return Finding("speed", f"{late} calls had not returned when time was up", "warning")
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
    text = f"p50 {1000 * p50:.3g} ms, p99 {1000 * p99:.3g} ms, slowest {1000 * ordered[-1]:.3g} ms"
    return Finding("speed", text, "warning" if p99 > _SLOW_SECONDS else "ok")


def _sameness(cases: Sequence[_Case]) -> Finding:
    """The same answer twice, the second time in another order and company."""
    twice = [case for case in cases if len(case.scores) > 1]
    for case in twice:
        first, second = case.scores[:2]
        if first.value != second.value:
            text = f"no: {case.sample.solution_str[:60]!r} scored {first.value:g}, then {second.value:g}"
            return Finding("same answer, same score", text, "failed")
    return Finding("same answer, same score", f"yes, {len(twice)} answers twice, in another order", "ok")


def _judgement(cases: Sequence[_Case], own_function: bool) -> Iterator[Finding]:
    right = {case.row: case for case in cases if case.kind == "right"}
    if right:
        yield _on_right(list(right.values()), cases, own_function)
    names: dict[str, str] = {"empty": "empty answer", "everything": "answer with every number"}
    for kind, question in names.items():
        tried = [case for case in cases if case.kind == kind]
        highest = max(tried, key=lambda case: case.value, default=None)
        if highest is None:
            continue
        # Full score is what the right answer got, if that was anything at all.
        fooled = [case for case in tried if case.value > 0 and case.value >= _full(right.get(case.row))]
        text = f"scores {highest.value:g} at most"
        if fooled:
            text = f"gets full score ({fooled[0].value:g}) in {len(fooled)} of {len(tried)}: {_shown(fooled[0])}"
        elif kind == "empty" and highest.value > 0:
            yield Finding(question, text, "warning" if own_function else "failed")
            continue
        yield Finding(question, text, "failed" if fooled else "ok")


def _full(right: _Case | None) -> float:
    return right.value if right is not None and right.value > 0 else float("inf")


def _on_right(right: Sequence[_Case], cases: Sequence[_Case], own_function: bool) -> Finding:
    question = "ground truth as the answer"
    if not own_function:
        wrong = [case for case in right if case.value != 1.0]
        if not wrong:
            return Finding(question, f"scores 1 in all {len(right)} rows", "ok")
        text = f"scores {wrong[0].value:g} in {len(wrong)} of {len(right)} rows: {_shown(wrong[0])}"
        return Finding(question, text, "failed")
    empty = {case.row: case.value for case in cases if case.kind == "empty"}
    no_better = [case for case in right if case.value <= empty.get(case.row, 0.0)]
    if not no_better:
        return Finding(question, f"scores {min(case.value for case in right):g} at least", "ok")
    text = (
        f"scores no better than no answer in {len(no_better)} of {len(right)} rows: {_shown(no_better[0])}. If the "
        "function wants another format, tell: register_score(data_source, answer=…)"
    )
    return Finding(question, text, "warning")


def _shown(case: _Case) -> str:
    return f"answer {case.sample.solution_str[:60]!r}, ground truth {str(case.sample.ground_truth)[:60]!r}"


class _Clock:
    """The time that is left."""

    def __init__(self, budget: float | None) -> None:
        self._start = time.monotonic()
        self._budget = budget

    def half_gone(self) -> bool:
        return self._budget is not None and time.monotonic() - self._start > self._budget / 2

    def affordable(self, seconds: Sequence[float]) -> int:
        """How many calls that take so long are likely to fit, and at least a few; nobody waits for the others."""
        if self._budget is None or not seconds:
            return sys.maxsize
        left = max(0.0, self._start + self._budget - time.monotonic())
        return max(_FEWEST_CALLS, int(left / (sum(seconds) / len(seconds))))

    def wait(self, future: Future[Score]) -> Score | None:
        """The score, or None when time is up. A pool stops what takes too long, so without a budget it comes."""
        left = None if self._budget is None else max(0.0, self._start + self._budget - time.monotonic())
        try:
            return future.result(timeout=left)
        except TimeoutError:
            return None
