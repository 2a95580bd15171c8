"""Solutions that try to pass a test without the expected value, by objects, exceptions and files; all must score 0."""
# ruff: noqa: E501 - programs are kept as they are

from __future__ import annotations

from typing import Any

from tests.support.code_rewards.solutions import Case

_ANY_METHOD = "class f:\n    def __init__(self, *a): pass\n    def __getattr__(self, name): return lambda *a: True\n    def equals(self, o): return True"
_CLASS_RESULT = (
    "class Q:\n    startswith = endswith = isdisjoint = equals = staticmethod(lambda *a: True)\ndef f(x): return Q"
)
_CALLABLE = "class R:\n    def startswith(self, *a): return True\n    endswith = issubset = equals = startswith\nclass C:\n    def __call__(self, *a): return R()\nf = C()"
_VALUE_METHODS = {
    "startswith": "assert f('x').startswith('hello')",
    "endswith": "assert f('x').endswith('hello')",
    "issubset": "assert f(3).issubset({1, 2})",
    "isdisjoint": "assert f(1).isdisjoint([4])",
    "all": "assert f([1]).all()",
    "equals": "assert f(3).equals([1, 2, 3])",
    "find": "assert f('x').find('a') == 0",
}
_POLY = "import math\n\ndef poly(xs: list, x: float):\n    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n\ndef find_zero(xs: list):\n    pass\n"
_FIND_ZERO: dict[str, Any] = {
    "prompt": _POLY,
    "entry_point": "find_zero",
    "test": "import math, random, copy\ndef check(candidate):\n    rng = random.Random(42)\n    for _ in range(20):\n"
    "        coeffs = [rng.randint(1, 10) for _ in range(2 * rng.randint(1, 4))]\n"
    "        solution = candidate(copy.deepcopy(coeffs))\n        assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
}
_STATEFUL_FLOAT = "class X:\n    def __init__(self, xs): self.xs, self.n = xs, -1\n    def __float__(self):\n        self.n += 1\n        return -self.xs[0] / self.xs[1] if self.n == 1 else 0.0\ndef find_zero(xs): return X(xs)"
_RUN = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n"
_UNITTEST = (
    _RUN + "r = unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(T))\nassert r.wasSuccessful()"
)
_RAISED = {
    "skip": "import unittest\ndef f(x): raise unittest.SkipTest('x')",
    "skip-subclass": "import unittest\nclass Skip(unittest.SkipTest): pass\ndef f(x): raise Skip('x')",
    "should-stop": "import unittest.case\ndef f(x): raise unittest.case._ShouldStop",
    "unexpected-success": "import unittest.case\ndef f(x): raise unittest.case._UnexpectedSuccess",
    "system-exit": "def f(x): raise SystemExit(0)",
    "keyboard-interrupt": "def f(x): raise KeyboardInterrupt",
    "generator-exit": "def f(x): raise GeneratorExit",
}
_STOPS = {
    "stop": "def f(x): raise StopIteration",
    "stop-subclass": "class Stop(StopIteration): pass\ndef f(x): raise Stop",
}
_LOOPS = [
    "assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (3, 4)]))",
    "for a, b in zip(map(f, [1, 2]), [3, 4]):\n    assert a == b",
]
_EMPTY = {
    "list": "[]",
    "tuple": "()",
    "array": "np.array([])",
    "no-rows": "np.zeros((0, 1))",
    "nested": "[[]]",
    "range": "range(0)",
}
_BROADCASTS = [
    "import pytest\nassert f(2) == pytest.approx(3.14)",
    "import numpy as np\nassert np.allclose(f(2), 3.14)",
    "import numpy as np\nassert np.allclose(f(2), [1.0])",
    "import numpy as np\nassert (f(2) == np.array([1.0])).all()",
    "import numpy as np\nassert np.all(f(2) == np.array([1.0]))",
    "import numpy as np\nassert np.isclose(f(2), 9).all()",
    "import numpy as np\nnp.testing.assert_allclose(f(2), 3.14)",
    "import numpy as np\nnp.testing.assert_array_equal(f(2), 3)",
]
_LIARS = {
    "len": ("class R:\n    def __len__(self): return 0\n    def __getitem__(self, i): raise IndexError\ndef f(*a): return R()",
            "r = f([3, 1, 2])\nfor i in range(len(r) - 1):\n    assert r[i] <= r[i + 1]"),
    "items": ("class R:\n    def __len__(self): return 3\n    def __iter__(self): return iter([2, 3, 5])\n    def __getitem__(self, i): return 7\ndef f(*a): return R()",
              "r = f(105)\nassert len(r) == 3\nassert all(x in (2, 3, 5) for x in r)\nassert r[0] == 7"),
    "str": ("class R:\n    def __str__(self): return '4'\n    __repr__ = __str__\ndef f(x): return R()", "assert str(f(2)) == '4'"),
    "second-pass": ("class R:\n    n = 0\n    def __iter__(self):\n        R.n += 1\n        return iter([R.n])\ndef f(x): return R()",
                    "r = f(1)\nassert list(r) == [1] and list(r) == [2]"),
    "result-of-method": ("class R:\n    def __float__(self): return 4.0\nclass Shape:\n    def area(self): return R()",
                         "import math\nassert math.isclose(Shape().area(), 4.0)"),
    "isclose": ("isclose = lambda a, b: True\ndef f(x): return 0", "assert isclose(f(2), 4)"),
    "fabs": ("fabs = lambda x: 0\ndef f(x): return 0", "assert fabs(f(2) - 4) < 1e-6"),
}  # fmt: skip


def _cases() -> list[Case]:
    cases = [Case("stateful-float", _STATEFUL_FLOAT, _FIND_ZERO, 0.0)]
    for name, program in {"any-method": _ANY_METHOD, "class-result": _CLASS_RESULT, "callable": _CALLABLE}.items():
        cases += [Case(f"{name}-{method}", program, [test], 0.0) for method, test in _VALUE_METHODS.items()]
    cases += [Case(f"raise-{name}", program, [_UNITTEST], 0.0) for name, program in _RAISED.items()]
    cases += [
        Case(f"{name}-{number}", program, [test], 0.0)
        for name, program in _STOPS.items()
        for number, test in enumerate(_LOOPS)
    ]
    cases += [
        Case(f"empty-{name}-{number}", f"import numpy as np\ndef f(x): return {value}", [test], 0.0)
        for name, value in _EMPTY.items()
        for number, test in enumerate(_BROADCASTS)
    ]
    cases += [Case(f"liar-{name}", program, [test], 0.0) for name, (program, test) in _LIARS.items()]
    for test in ("gcd(12, 18) == 6", "sqrt(4) == 2", "sum([1, 2]) == 3"):
        cases.append(Case(f"not-defined-{test}", "x = 1", [f"assert {test}"], 0.0))
    cases.append(Case("not-defined-call", "x = 1", {"inputs": [[12, 18]], "outputs": [6], "fn_name": "gcd"}, 0.0))
    return cases


FORGERIES = _cases()
