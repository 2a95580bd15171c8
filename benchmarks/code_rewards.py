"""Samples that a code reward scores per second: in judge and candidate processes, and in one process as before.

    python benchmarks/code_rewards.py [--samples 40] [--rounds 5] [--json results.jsonl]

Tasks in the styles of MBPP (three assertions), HumanEval (one `check` of seven) and of programs that read stdin (three
tests). "One process" executes the assertions beside the solution, which could forge them. The variants alternate in one
run. The limit: bare sandbox runs per second, the least that a sample costs. The last rows: the share of the tests of a
corpus (`tests/support/code_rewards`) that has to be executed in the process of the solution.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import report

from verl.utils.code_runner import CodeSettings
from verl.utils.reward_score import code
from verl.utils.reward_score.code_analysis import Plan
from verl.utils.reward_score.code_tests import AssertTest, read_tests

sys.path.insert(0, str(Path(__file__).parents[1]))

_FUNCTION = "```python\ndef total(xs):\n    return sum(xs)\n```"
_PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
_CHECK = "def check(candidate):\n" + "".join(f"    assert candidate([{n}, 2]) == {n + 2}\n" for n in range(7))
TASKS: dict[str, tuple[str, Any]] = {
    "MBPP": (_FUNCTION, {"test_list": [f"assert total([{n}, 1]) == {n + 1}" for n in range(3)]}),
    "HumanEval": (_FUNCTION, {"test": _CHECK, "entry_point": "total"}),
    "stdin": (_PROGRAM, {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}),
}


def measure(samples: int = 40, rounds: int = 5) -> list[dict[str, Any]]:
    """Rows for `_report.report`: medians over rounds."""
    settings = CodeSettings(require="none")
    sandbox = settings.sandbox()
    rows = []
    bare = statistics.median(_rate(lambda: sandbox.run("print(1)"), samples) for _ in range(rounds))
    for name, (answer, truth) in TASKS.items():

        def judged(answer: str = answer, truth: Any = truth) -> None:
            assert code.compute_score(answer, truth, settings=settings)["score"] == 1.0

        def beside(judged: Callable[[], None] = judged) -> None:
            code.read_tests = _in_one_process
            try:
                judged()
            finally:
                code.read_tests = read_tests

        rates: dict[str, list[float]] = {"judged": [], "one process": []}
        for _ in range(rounds):
            rates["judged"].append(_rate(judged, samples))
            rates["one process"].append(_rate(beside, samples))
        now, before = (statistics.median(rates[which]) for which in rates)
        row = {"task": name, "samples/s": now, "one process: samples/s": before, "time ratio": before / now}
        rows.append({**row, "limit: bare runs/s": bare})
    return [*rows, *_forgeable_share()]


def _in_one_process(ground_truth: Any) -> list[Any]:
    tests = read_tests(ground_truth)
    beside = Plan(reason="benchmark")
    return [dataclasses.replace(test, plan=beside) if isinstance(test, AssertTest) else test for test in tests]


def _forgeable_share() -> list[dict[str, Any]]:
    from tests.support.code_rewards.solutions import CASES

    tests = [test for case in CASES for test in read_tests(case.ground_truth)]
    forgeable = sum(test.forgeable for test in tests)
    return [{"task": f"corpus: {forgeable} of {len(tests)} tests forgeable", "forgeable": forgeable / len(tests)}]


def _rate(action: Callable[[], object], count: int) -> float:
    action()
    began = time.perf_counter()
    for _ in range(count):
        action()
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    report("Code rewards: samples per second", measure(arguments.samples, arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
