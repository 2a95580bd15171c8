"""Rewards for programs, run in the real sandbox: right, half right and wrong ones, those that cheat or break out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from verl.sandbox import REQUIRE, available
from verl.sandbox.code_runner import CodeSettings
from verl.utils.process_tree import with_descendants
from verl.utils.reward_score import code, default_compute_score
from verl.utils.reward_score.code import compute_score, extract_code
from verl.utils.reward_score.code_tests import CallTest, read_tests, same_output, same_value
from verl.utils.reward_score.registry import set_arguments
from verl.workers.reward_manager.scorer import Sample, ScorerPool

SETTINGS = CodeSettings(require=min(("files", available().level), key=REQUIRE.index), wall_s=12)
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 5\n", "2 2\n"], "outputs": ["3\n", "7", "10\n\n", "4"]})
READ = "a, b = map(int, input().split())\n"


def scored(program, truth=SUMS, **arguments):
    text = f"I think:\n```python\n{textwrap.dedent(program)}\n```"
    return compute_score(text, truth, settings=SETTINGS, **arguments)


# ---------------------------------------------------------------- whole programs


def test_a_right_program_scores_1():
    result = {"score": 1.0, "acc": 1.0, "passed": 4, "tests": 4, "outcome": "passed", "forgeable": 0}
    assert scored(READ + "print(a + b)") == result


def test_a_half_right_program_gets_its_share_or_nothing():
    program = READ + "print(a * b if a != b else a + b)"
    result = {"score": 0.5, "acc": 0.0, "passed": 2, "tests": 4, "outcome": "wrong answer", "forgeable": 0}
    assert scored(program) == result
    assert scored(program, continuous=False)["score"] == 0.0


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("def (", "syntax error"),
        ("1 / 0", "runtime error"),
        ("import sys; sys.exit(1)", "runtime error"),
        ("while True: pass", "time limit"),
        ("x = [0] * 10**10", "runtime error"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "runtime error"),
    ],
)
def test_a_program_that_fails_scores_0_and_says_how(program, outcome):
    told = scored(program, timeout=1)
    assert (told["score"], told["outcome"]) == (0.0, outcome)


def test_programs_end_as_programs_do():
    """By exit, through a thread with a larger stack, with output at exit: all are usual in contests."""
    assert scored(READ + "import sys\nprint(a + b)\nsys.exit()")["score"] == 1.0
    thread = "import threading\ndef f(): print(sum(map(int, input().split())))\nthreading.Thread(target=f).start()"
    assert scored(thread)["score"] == 1.0
    assert scored(READ + "import atexit\natexit.register(lambda: print(a + b))")["score"] == 1.0
    assert scored("import os\nprint(sum(map(int, os.read(0, 100).split())))")["score"] == 1.0
    assert scored("if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))")["score"] == 1.0


def test_one_test_that_hangs_costs_only_itself():
    program = READ + "while a == 3: pass\nprint(a + b)"
    assert scored(program, timeout=1)["score"] == 0.75


def test_an_attack_reaches_nothing(tmp_path):
    if not available().files:
        pytest.skip("this host isolates no files")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    attack = f"import os\nos.system('rm -rf {tmp_path} ~/.verl_attack; touch ~/.verl_attack')\nopen({str(mine)!r}, 'w')"
    assert scored(attack)["score"] == 0.0
    assert mine.read_text() == "mine"
    assert not os.path.exists(os.path.expanduser("~/.verl_attack"))


def test_expected_outputs_are_nowhere_in_the_sandbox():
    """A solution that dumps all it can see: its process and its files."""
    truth = json.dumps({"inputs": ["x"], "outputs": ["canary-7391"]})
    program = """
        import gc, os, sys
        seen = [open(os.path.join(d, f), errors="replace").read() for d, _, fs in os.walk(".") for f in fs]
        seen += [str(o) for o in gc.get_objects() if isinstance(o, (dict, list, str))]
        frame = sys._getframe()
        while frame:
            seen.append(str(frame.f_locals)); frame = frame.f_back
        import re
        print(re.findall("canary-[0-9]+", " ".join(seen)) or "nothing")
    """
    assert scored(program, truth)["score"] == 0.0
    truth = json.dumps({"inputs": ["x"], "outputs": ["nothing"]})
    assert scored(program, truth)["score"] == 1.0


# ---------------------------------------------------------------- functions and assertions

TOTAL = {"inputs": [[[1, 2, 3]], "[4, 5]", [[]]], "outputs": [6, [9], "0"], "fn_name": "total"}


def test_functions_are_called_also_as_methods_of_a_solution():
    assert scored("def total(xs): return sum(xs)", TOTAL)["score"] == 1.0
    method = "class Solution:\n    def total(self, xs: List[int]) -> int:\n        return sum(xs)"
    assert scored(method, json.dumps(TOTAL))["score"] == 1.0
    assert scored("def total(xs): return sum(xs[:1]) or 0", TOTAL)["score"] == pytest.approx(1 / 3)
    assert scored("def totals(xs): return sum(xs)", TOTAL)["outcome"] == "runtime error"


def test_a_value_that_equals_everything_is_not_believed():
    yes = "class Yes:\n    def __eq__(self, other): return True\ndef total(xs): return Yes()"
    assert scored(yes, TOTAL)["score"] == 0.0


FORGED = """import os
    for file in range(3, 10):
        try:
            os.write(file, b'{}\\n')
        except OSError:
            pass
    os._exit(0)"""


@pytest.mark.parametrize(
    "body",
    [
        "return 10 ** 400",
        "deep = []\n    for _ in range(3000): deep = [deep]\n    return deep",
        FORGED.format("5"),
        FORGED.format('{"status": "done"}'),
    ],
)
def test_what_cannot_be_compared_or_is_forged_scores_0_and_is_no_failure(body):
    """A scorer that raises would have the sample masked, and so spare a wrong answer its 0."""
    truth = {"inputs": [[[1, 2]]], "outputs": [3.5], "fn_name": "total"}
    assert scored(f"def total(xs):\n    {body}", truth)["score"] == 0.0


MBPP = {"test_list": ["assert f(1) == 2", "assert f(2) == N"], "test_setup_code": "N = 3"}


def test_assertions_are_tests_of_their_own():
    assert scored("def f(x): return x + 1", MBPP)["score"] == 1.0
    assert scored("def f(x): return 2 * x", MBPP) == {
        "score": 0.5,
        "acc": 0.0,
        "passed": 1,
        "tests": 2,
        "outcome": "wrong answer",
        "forgeable": 0,
    }
    assert scored("def f(x): return x + 1", ["assert f(1) == 2"])["score"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os\ndef f(x): os._exit(0)",
        "import sys\ndef f(x): sys.exit(0)",
        "raise SystemExit(0)",
        "import builtins\nbuiltins.AssertionError = RuntimeError\ndef f(x): return 0",
    ],
)
def test_ending_early_is_no_pass(program):
    assert scored(program, MBPP)["score"] == 0.0


def test_an_array_without_dimensions_is_not_empty():
    test = "import numpy as np\nassert np.allclose(f(3), 3.0)"
    assert scored("import numpy as np\ndef f(x): return np.asarray(float(x))", [test])["score"] == 1.0


def test_one_assertion_that_fails_costs_only_itself():
    """By time, by the end of its process, by an exception: the checker of the next test is ready, or another one is."""
    tests = [f"assert f({number}) == {number}" for number in range(5)]
    program = (
        "import os\ndef f(x):\n    while x == 1: pass\n    if x == 2: os._exit(0)\n    return x / (x - 3) * (x - 3)"
    )
    result = scored(program, tests, timeout=1)
    assert (result["passed"], result["outcome"]) == (2, "time limit")
    last = scored(
        "def f(x):\n    while x == 1: pass\n    return x", ["assert f(0) == 0", "assert f(1) == 1"], timeout=1
    )
    assert (last["passed"], last["outcome"]) == (1, "time limit")
    only = scored("def f(x):\n    while x == 1: pass\n    return x", ["assert f(1) == 1"], timeout=1)
    assert (only["passed"], only["outcome"]) == (0, "time limit")


def started_driver(tests, **job):
    """A driver without its input, and the blocks of that: the job and those of `tests`."""
    job = {"solution": "def f(x): return x", "kinds": [test.kind for test in tests], "stop_at_failure": False, **job}
    texts = map(json.dumps, [job, *(block for test in tests for block in test.blocks())])
    command = [sys.executable, "-c", code.driver_program(preloaded=False)]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return driver, [f"{len(text):10d}{text}" for text in texts]


def test_statements_that_arrive_late_do_not_shift_those_of_later_tests():
    tests = read_tests(["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"])
    driver, (first, *others) = started_driver(tests, timeout=1.0, budget=20.0)
    with driver:
        driver.stdin.write(first)
        driver.stdin.flush()
        time.sleep(2)  # longer than the time limit of a test
        stdout, _ = driver.communicate("".join(others), timeout=60)
    assert [json.loads(line).get("report") for line in stdout.splitlines()] == [test.token for test in tests]


def test_statements_that_do_not_arrive_use_up_the_budget_and_no_more():
    tests = read_tests(["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"])
    driver, blocks = started_driver(tests, timeout=1.0, budget=4.0)
    with driver:
        driver.stdin.write("".join(blocks[:2]))
        driver.stdin.flush()
        try:
            outcomes = [json.loads(driver.stdout.readline()) for _ in tests]  # stdin stays open
        finally:
            driver.kill()
    assert [outcome["status"] for outcome in outcomes] == ["done", "timeout", "timeout"]


def of_kinds(kinds):
    """Tests of these kinds, which `def f(x): return x` passes."""
    sources = {"checked": "assert f(1) == 1", "assert": "assert f(1) == 1 and locals()"}
    tests = [CallTest("f", [1], 1) if kind == "call" else read_tests([sources[kind]])[0] for kind in kinds]
    assert [test.kind for test in tests] == kinds
    return tests


@pytest.mark.parametrize(
    ("kinds", "on_time"),
    [(["call", "assert", "assert"], 1), (["call", "assert", "assert"], 2), (["call", "checked"], 1)],
)
def test_the_wait_for_a_late_block_does_not_count_in_the_time_limit_of_a_test(kinds, on_time):
    """`on_time`: number of blocks of tests that are not late."""
    tests = of_kinds(kinds)
    driver, (job, *blocks) = started_driver(tests, timeout=1.0, budget=20.0)
    with driver:
        driver.stdin.write("".join([job, *blocks[:on_time]]))
        driver.stdin.flush()
        time.sleep(3)  # longer than the start of the driver and the time limit of a test
        stdout, _ = driver.communicate("".join(blocks[on_time:]), timeout=60)
    outcomes = [json.loads(line) for line in stdout.splitlines()]
    assert [outcome["status"] for outcome in outcomes] == ["done"] * len(tests)
    assert all(test.passed(outcome) for test, outcome in zip(tests, outcomes, strict=True))


@pytest.mark.parametrize(
    ("kinds", "on_time", "characters"),
    [
        (["call", "assert", "assert"], 0, 5),
        (["call", "assert", "assert"], 1, 0),
        (["call", "assert", "assert"], 2, 0),
        (["call", "assert", "assert"], 2, 15),
        (["call", "checked"], 1, 0),
        (["call", "checked"], 1, 15),
    ],
)
def test_all_tests_have_an_outcome_if_a_block_does_not_arrive_before_the_budget_is_over(kinds, on_time, characters):
    """`characters`: number of characters of the next block that arrive."""
    tests = of_kinds(kinds)
    driver, (job, *blocks) = started_driver(tests, timeout=1.0, budget=2.0)
    with driver:
        driver.stdin.write("".join([job, *blocks[:on_time], blocks[on_time][:characters]]))
        driver.stdin.flush()
        try:
            status = driver.wait(timeout=20)  # stdin stays open
        finally:
            driver.kill()
        outcomes = [json.loads(line)["status"] for line in driver.stdout]
    first = "timeout" if on_time == 0 else "done"
    assert (status, outcomes) == (0, [first, *["timeout"] * (len(tests) - 1)])


@pytest.mark.parametrize(
    ("number", "statuses"), [(signal.SIGKILL, ["done"] * 3), (signal.SIGSTOP, ["done", "timeout", "timeout"])]
)
def test_a_checker_that_is_killed_before_it_reads_a_test_is_replaced(number, statuses):
    """A stopped one is not: it may have read the test."""
    tests = read_tests(["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"])
    driver, blocks = started_driver(tests, timeout=20.0, budget=60.0 if number == signal.SIGKILL else 5.0)
    with driver:
        driver.stdin.write("".join(blocks[:2]))
        driver.stdin.flush()
        first = driver.stdout.readline()
        _, checker = with_descendants(driver.pid)
        process = psutil.Process(checker)
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait(30)  # until it has ended, its pending read may take what is written next
        try:
            stdout, _ = driver.communicate("".join(blocks[2:]), timeout=60)
        finally:
            driver.kill()
    outcomes = [json.loads(line) for line in [first, *stdout.splitlines()]]
    assert [outcome["status"] for outcome in outcomes] == statuses
    reports = [test.token if status == "done" else None for test, status in zip(tests, statuses, strict=True)]
    assert [outcome.get("report") for outcome in outcomes] == reports


def test_humaneval_checks_the_entry_point_and_may_be_continued():
    truth = {"test": "def check(f):\n    assert f(3) == 9", "entry_point": "sq", "prompt": "def sq(x):\n"}
    assert scored("def sq(x): return x * x", truth)["score"] == 1.0
    assert compute_score("```\n    return x * x\n```", truth, settings=SETTINGS)["score"] == 1.0
    assert scored("def sq(x): return x", truth)["score"] == 0.0


def test_other_languages_run_where_their_tools_are():
    truth = {"inputs": ["2"], "outputs": ["4"]}
    cpp = "```cpp\n#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; }\n```"
    assert compute_score(cpp, truth, settings=SETTINGS)["score"] == 1.0
    assert compute_score("```bash\nread x; echo $((2 * x))\n```", truth, settings=SETTINGS)["score"] == 1.0
    assert compute_score("```bash\nread x\n```", TOTAL, settings=SETTINGS)["score"] == 0.0


# ---------------------------------------------------------------- scorer processes


def family_at_rest() -> set[int]:
    """Earlier tests' sandbox may still be making a process ready for its next program."""
    found: set[int] = set()
    while found != (now := set(with_descendants(os.getpid()))):
        found = now
        time.sleep(0.5)
    return found


@pytest.mark.slow
def test_scorers_run_the_sandbox_get_their_settings_and_take_it_with_them():
    """A scorer that is killed by its time limit leaves no process behind; others go on."""
    set_arguments(code.compute_score, settings=SETTINGS)
    before = family_at_rest()
    programs = {"print(sum(map(int, input().split())))": 1.0, "while True: pass": None, "print(3)": 0.25}
    samples = [Sample("apps", f"```python\n{program}\n```", SUMS) for program in programs]
    try:
        with ScorerPool(default_compute_score, processes=2, timeout=8) as pool:
            scores = pool.score(samples)
    finally:
        set_arguments(code.compute_score)
    assert [score.value if score.error is None else None for score in scores] == list(programs.values())
    assert scores[1].kind == "timeout"
    assert set(with_descendants(os.getpid())) <= before


# ---------------------------------------------------------------- reading answers and truths


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```", ("python", "x = 2\n")),
        ("```python\nx = 1\n```\n```text\nx = 2\n```", ("python", "x = 1\n")),
        ("```python\nnever closed", ("python", "never closed")),
        ("```c++\nint x;\n```", ("cpp", "int x;\n")),
        ("  ```\n  x\n  ```", ("python", "  x\n")),
        ("no code", None),
        ("```python\n\n```", None),
    ],
)
def test_the_last_fenced_block_is_the_code(text, found):
    assert extract_code(text) == found


def test_an_answer_without_code_is_never_run():
    assert compute_score("42", SUMS)["outcome"] == "no code"


def test_the_label_of_the_tests_does_not_depend_on_the_answer():
    for test, forgeable in (("assert f(1) == 2", 0), ("assert P(1) == P(1)", 1)):
        result = compute_score("no program", [test])
        assert (result["outcome"], result["forgeable"]) == ("no code", forgeable)


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("x", "^ground_truth: .*JSON.*line 1 column 1"),
        ("{}", "^ground_truth: .*inputs and outputs, test_list"),
        ({"inputs": ["1"], "outputs": []}, "^ground_truth: 1 inputs .*0 outputs"),
        (7, "^ground_truth: .*'7'"),
    ],
)
def test_a_wrong_ground_truth_is_told(truth, words):
    with pytest.raises(ValueError, match=words):
        read_tests(truth)


def test_livecodebench_rows_are_tests():
    rows = [{"input": "1", "output": "2", "testtype": "stdin"}, {"input": "[1]", "output": "2", "fn_name": "f"}]
    stdin, call = read_tests(json.dumps(rows))
    assert (stdin.stdin, stdin.expected, call.arguments, call.expected) == ("1", "2", [[1]], 2)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("0.3333333", "0.33333334", True),
        ("0.34", "0.33333334", False),
        ("10000000000000001", "10000000000000000", False),
        ("1e16", "10000000000000000", False),
        ("yes", "YES", False),
        ("1\n2", "1", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("inf", "inf", True),
        ("", "", True),
    ],
)
def test_outputs_are_compared_by_line_and_numbers_by_value(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], (1, 2), True),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3, 4, False),
        ({"1": 2}, {1: 2}, True),
        ("1", 1, False),
        (None, None, True),
    ],
)
def test_values_are_compared_as_json(found, expected, same):
    assert same_value(found, expected) is same
