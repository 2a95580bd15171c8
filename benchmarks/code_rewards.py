"""Samples per second of code rewards, compared with an earlier commit and with bare sandbox runs.

    python benchmarks/code_rewards.py [--before e2070c9] [--threads 4] [--samples 16] [--rounds 8] [--json …]

Tasks in the styles of MBPP (three assertions), HumanEval (one `check` of seven) and of programs that read stdin (three
tests), `threads` samples at once. Each source tree has a worker process; they alternate, and medians over the
rounds are compared.
`e2070c9` is the last commit that executed assertions in the process of the solution. The limit: bare sandbox runs per
second, the least that a sample costs. The last row: the share of the tests of a corpus (`tests/support/code_rewards`)
that still have to be executed in the process of the solution.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _report import report

_ROOT = Path(__file__).parents[1]
_FUNCTION = "```python\ndef total(xs):\n    return sum(xs)\n```"
_PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
_CHECK = "def check(candidate):\n" + "".join(f"    assert candidate([{n}, 2]) == {n + 2}\n" for n in range(7))
TASKS: dict[str, tuple[str, Any]] = {
    "MBPP": (_FUNCTION, {"test_list": [f"assert total([{n}, 1]) == {n + 1}" for n in range(3)]}),
    "HumanEval": (_FUNCTION, {"test": _CHECK, "entry_point": "total"}),
    "stdin": (_PROGRAM, {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}),
}


def measure(before: str | None, threads: int = 4, samples: int = 16, rounds: int = 8) -> list[dict[str, Any]]:
    """Rows for `_report.report`."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {"now": str(_ROOT)}
        if before is not None:
            archive = subprocess.run(["git", "archive", before, "verl"], cwd=_ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            trees["before"] = folder
        workers = {name: _Worker(tree, threads) for name, tree in trees.items()}
        limit = statistics.median(workers["now"].rate("bare", samples) for _ in range(rounds))
        for task in TASKS:
            rates: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(rounds):
                for name, worker in workers.items():
                    rates[name].append(worker.rate(task, samples))
            medians = {f"{name}: samples/s": statistics.median(values) for name, values in rates.items()}
            row: dict[str, Any] = {"task": task, **medians}
            if before is not None:
                row["time ratio"] = medians["before: samples/s"] / medians["now: samples/s"]
            rows.append({**row, "limit: bare runs/s": limit})
        for worker in workers.values():
            worker.close()
    return [*rows, _forgeable_share()]


class _Worker:
    """A process that scores with the package of one tree."""

    def __init__(self, tree: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tree, str(Path(__file__).parent)])},
        )
        for task in ("bare", *TASKS):
            self.rate(task, 2)

    def rate(self, task: str, samples: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{task} {samples}\n")
        self._process.stdin.flush()
        return samples / float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def _work(threads: int) -> None:
    try:
        from verl.sandbox.code_runner import CodeSettings
    except ImportError:  # the tree of --before
        CodeSettings = pkgutil.resolve_name("verl.utils.code_runner:CodeSettings")
    from verl.utils.reward_score.code import compute_score

    settings = CodeSettings(require="none", warm=threads)
    sandbox = settings.sandbox()

    def score(task: str) -> None:
        if task == "bare":
            sandbox.run("print(1)")
        else:
            assert compute_score(*TASKS[task], settings=settings)["score"] == 1.0

    with ThreadPoolExecutor(threads) as pool:
        for line in sys.stdin:
            task, samples = line.split()
            began = time.perf_counter()
            list(pool.map(score, [task] * int(samples)))
            print(time.perf_counter() - began, flush=True)


def _forgeable_share() -> dict[str, Any]:
    sys.path.insert(0, str(_ROOT))
    from tests.support.code_rewards.solutions import CASES
    from verl.utils.reward_score.code_tests import read_tests

    tests = [test for case in CASES for test in read_tests(case.ground_truth)]
    forgeable = sum(test.forgeable for test in tests)
    return {"task": f"corpus: {forgeable} of {len(tests)} tests", "forgeable": forgeable / len(tests)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=None, help="commit to compare with")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.threads)
        return
    rows = measure(arguments.before, arguments.threads, arguments.samples, arguments.rounds)
    report("Code rewards: samples per second", rows, arguments.json)


if __name__ == "__main__":
    main()
