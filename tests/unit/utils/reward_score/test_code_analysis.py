"""Which tests a checker can execute, decided from their source, and which names the solution provides."""

from __future__ import annotations

import pytest

from verl.utils.reward_score.code_tests.analysis import plan_execution


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("assert f(1) == 2", ["f"]),
        ("assert set(f([1])) == set([1])", ["f"]),
        ("assert sum(10, 15) == 6", ["sum"]),
        ("assert gcd(12, 18) == 6", ["gcd"]),
        ("assert math.isclose(area(2), 12.5)", ["area"]),
        ("import math\nassert abs(f(1) - math.pi) < 1e-6", ["f"]),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1 and len(s) == 0", ["Stack"]),
        ("try:\n    f(-1)\nexcept TooLow as error:\n    assert str(error) == 'low'", ["TooLow", "f"]),
        ("assert depth(root) == 2\n", ["depth", "root"]),
        ("assert f([x * 2 for x in range(3)], key=lambda y: -y) == 1", ["f"]),
        ("assert re.compile('a').match(f(1))", ["f"]),
        ("assert np.allclose(f(1), [1.0])", ["f"]),
        ("assert (f(1), f(2)) == (2, 3)", ["f"]),
        ("assert 1 <= f(1) <= 2 and f(2) < 4", ["f"]),
        ("assert decode(encode('a')) == 'a'", ["decode", "encode"]),
        ("assert isclose(f(2), 4)", ["f"]),
        ("assert f('x').startswith('y')", ["f"]),
    ],
)
def test_a_checker_executes_calls_on_plain_data(source, names):
    result = plan_execution(source)
    assert result.reason is None
    assert result.names == names


@pytest.mark.parametrize(
    "source",
    [
        "assert Point(1) == Point(1)",
        "p = Point(1)\nassert p + p == 2",
        "p, q = Point(1), Point(2)\nassert p < q",
        "assert f() == Color.RED",
        "assert 3 in Tree()",
        "assert sorted([P(2), P(1)])[0].x == 1",
        "a = P(1)\nb = P(2)\nassert a.next == b.next",
        "import inspect\nassert inspect.signature(f)",
        "import builtins\nbuiltins.input = lambda: '5'\nassert f() == 5",
        "from unittest import mock\nassert f(mock.Mock())",
        "assert eval(f(1)) == 2",
        "assert f.__globals__",
        "import pandas as pd\nassert f(pd.DataFrame()).equals(1)",
        "class Fake:\n    pass\nassert f(Fake()) == 1",
        "import asyncio\nassert asyncio.run(f(1)) == 1",
        "assert f(1) == EXPECTED",
        "random.seed(1)\nassert f() == 4",
        "assert make(1) == make(1)",
        "a = make(1)\nb = make(2)\nassert a < b",
        "assert len({make(1), make(1)}) == 1",
        "with ignore(ValueError):\n    raise ValueError()",
        "assert is_equal(f(2), 4)",
        "assert close(f(2) - 4)",
        "s = stack()\ns.push(1)\nassert s.pop() == 1",
        "assert Builder().add(1).add(2).total == 3",
        "try:\n    f()\nexcept SystemExit as error:\n    assert error.code == 3",
        "import numpy as np\nassert np.allclose(f([]), [])",
    ],
)
def test_what_needs_the_interpreter_of_the_solution_is_forgeable(source):
    assert plan_execution(source).reason is not None


def test_functions_of_the_task_are_not_taken_from_the_solution():
    prompt = "import math\nLIMIT = 3\ndef poly(xs, x):\n    return xs[0] + x\n\ndef root(xs):\n    '''Zero.'''\n"
    result = plan_execution(
        "def check(candidate):\n    assert poly([1], candidate([1])) == 0\ncheck(root)", "", "root", prompt
    )
    assert result.names == ["root"]
    assert "def poly" in result.prompt
    assert "def root" not in result.prompt


def test_constants_of_the_setup_stay_in_the_checker():
    setup = "import math\nN = 918273\ndef helper(x):\n    return x"
    result = plan_execution(f"{setup}\nassert f(1) == N", setup)
    assert "918273" not in result.definitions
    assert "helper" in result.definitions


def test_a_source_that_is_no_python_fails_in_the_checker():
    assert plan_execution("assert (").reason is None
