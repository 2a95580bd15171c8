"""Code rewards cannot be forged: a sample of the exploits and of the valid solutions of `tests/attacks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.code_rewards.exploits import exploits
from tests.support.code_rewards.forgeries import FORGERIES
from tests.support.code_rewards.solutions import CASES
from verl.sandbox import REQUIRE, available
from verl.sandbox.code_runner import CodeSettings
from verl.utils.reward_score.code import compute_score, driver_program
from verl.utils.reward_score.code_tests import read_tests

SETTINGS = CodeSettings(require=min(("files", available().level), key=REQUIRE.index), wall_s=12)
SAMPLE = (
    "frames-assert-function", "frames-check-thread", "gc-assert-import", "parent-memory-assert-thread",
    "parent-descriptors-check-function", "os-exit-assert-function", "survivor-assert-function",
    "patched-builtins-check-import", "modules-in-folder-assert-import", "liar-assert-function",
    "liar-int-check-function", "any-attribute-assert-import", "mock-check-function", "trace-assert-import",
    "wire-0-assert-function", "wire-7-check-import", "forged-lines-stdin-function", "liar-call-function",
)  # fmt: skip


def scored(answer, ground_truth, **arguments):
    return compute_score(answer, ground_truth, settings=SETTINGS, **arguments)


@pytest.mark.parametrize("exploit", [one for one in exploits() if str(one) in SAMPLE], ids=str)
def test_an_exploit_scores_0(exploit):
    result = scored(exploit.answer, exploit.ground_truth, timeout=2)
    assert (result["score"], result["forgeable"]) == (0.0, 0)


@pytest.mark.parametrize("case", FORGERIES[::3], ids=str)
def test_a_forgery_scores_0(case):
    result = scored(case.answer, case.ground_truth)
    assert (result["score"], result["forgeable"]) == (0.0, 0)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_a_solution_keeps_its_score(case):
    result = scored(case.answer, case.ground_truth)
    assert (result["score"], result["forgeable"]) == (case.score, case.forgeable)


# An object with every method that could make a comparison hold, and a value for every conversion.
LIAR = """
class Liar:
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return lambda *args: True
    def __hash__(self): return 0
    def __iter__(self): return iter([Liar()])
    def __float__(self): return 0.5
    def __len__(self): return 1
    def __getitem__(self, key): return Liar()
    def __bool__(self): return True
def _true(self, *args): return True
def _self(self, *args): return self
for _name in 'eq ne lt le gt ge contains instancecheck'.split(): setattr(Liar, f'__{_name}__', _true)
for _name in 'add radd sub rsub mul rmul truediv mod pow abs neg round call and rand xor'.split():
    setattr(Liar, f'__{_name}__', _self)
def f(x): return Liar()
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert 918273 == f(1)",
        "assert not f(1) != 918273",
        "assert abs(f(1) - 918273) < 1e-6",
        "assert f(1) <= 918273 <= f(1)",
        "assert math.isclose(f(1), 918273)",
        "assert f(1) in (918273,)",
        "assert 918273 in f(1)",
        "assert f(1)[0] == 918273",
        "assert f(1).startswith('918273')",
        "assert f(1).issubset({918273})",
        "assert f(1).value == 918273",
        "assert set(f(1)) == {918273}",
        "assert sorted(f(1)) == [918273]",
        "assert isinstance(f(1), int)",
        "assert all(a == b for a, b in zip(f(1), [918273]))",
        "import numpy as np\nassert np.allclose(f(1), [918273])",
        "import unittest\nunittest.TestCase().assertEqual(f(1), 918273)",
        "assert round(f(1), 2) == 918273",
    ],
)
def test_an_object_cannot_stand_for_a_value(test):
    result = scored(f"```python\n{LIAR}\n```", [test])
    assert (result["score"], result["forgeable"]) == (0.0, 0)


def test_the_solution_has_no_influence_on_the_label():
    """An object where a value is expected is wrong; it does not move the test into the solution's process."""
    answer = "```python\nclass P:\n    def __eq__(self, o): return True\ndef f(x): return P()\n```"
    assert scored(answer, ["assert f(1) == 2"])["forgeable"] == 0
    result = scored(answer, ["assert f(1) == P()"])
    assert (result["score"], result["forgeable"]) == (1.0, 1)


def test_a_surviving_process_is_gone_at_the_next_test():
    survivor = """
import os, time
def f(x):
    if x == 1 and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)
    time.sleep(0.1)
    return sum(os.path.exists(f'/proc/{pid}') for pid in range(2, 64))
"""
    if not available().namespaces:
        pytest.skip("without namespaces a solution sees no processes")
    counts = ["assert f(2) == 3", "assert f(1) > 3", "assert f(2) == 3"]  # driver, checker and candidate
    assert scored(f"```python\n{survivor}\n```", counts)["score"] == 1.0


def test_checker_and_candidate_are_apart_without_a_sandbox():
    """The source form of the program, which a server runs: same verdicts in a bare interpreter."""
    tests = read_tests(["assert f(1) == 918273", "assert f(2) == 2"])
    solution = """
import os
def f(x):
    for path in (f'/proc/{os.getppid()}/mem', f'/proc/{os.getppid()}/fd/0'):
        try:
            os.open(path, os.O_RDONLY)
            return 918273
        except OSError:
            pass
    return x
"""
    job = {"solution": solution, "kinds": [test.kind for test in tests], "timeout": 5.0, "budget": 10.0}
    blocks = [{**job, "stop_at_failure": False}, *(block for test in tests for block in test.blocks())]
    stdin = "".join(f"{len(text):10d}{text}" for text in map(json.dumps, blocks))
    done = subprocess.run(
        [sys.executable, "-c", driver_program(preloaded=False)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    protected = outcomes[0]["protected"]
    assert protected or (os.geteuid() == 0 and not available().landlock)
    assert [outcome["status"] for outcome in outcomes] == (["error", "done"] if protected else ["done", "error"])
    assert not protected or outcomes[1]["report"] == tests[1].token
