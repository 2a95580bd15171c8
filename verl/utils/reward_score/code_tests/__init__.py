"""Read the tests of a programming task from the ground truth of a row, and decide whether their outcomes pass.

The other modules of this package execute tests in the sandbox. `driver` starts a `checker` process, which executes the
statements of a test, and a `candidate` process, which executes the solution; they exchange `values` over a `channel`.
`analysis` decides from a test's source whether it can be executed apart from the solution.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from verl.utils.reward_score.code_tests.analysis import ExecutionPlan, plan_execution

# Field names of datasets for a list of assertions (MBPP: test_list).
_ASSERT_FIELDS = ("asserts", "test_list", "assert_case")
_SETUP_FIELDS = ("test_imports", "test_setup_code")
_TOLERANCE = 1e-6
# Output limits are powers of two from here on: a solution that sees its limit learns little about the expected output.
_MIN_OUTPUT_LIMIT = 1 << 16
Outcome = Mapping[str, Any]


class Test(Protocol):
    """One test; `blocks` are sent to the driver (`driver.py`), which runs it.

    `forgeable`: a solution can make it pass, because it has to be executed in the solution's own process.
    """

    @property
    def forgeable(self) -> bool: ...
    @property
    def kind(self) -> str: ...
    def blocks(self) -> list[dict[str, Any]]: ...
    def passed(self, outcome: Outcome) -> bool: ...


@dataclass(frozen=True)
class StdinTest:
    """Runs the solution as a program with an input and compares its output."""

    stdin: str
    expected: str
    kind = "stdin"
    forgeable = False

    def blocks(self) -> list[dict[str, Any]]:
        limit = _output_limit(2 * len(self.expected.encode()))
        return [{"kind": "stdin", "stdin": self.stdin, "max_bytes": limit}]

    def passed(self, outcome: Outcome) -> bool:
        return same_output(outcome["output"], self.expected)


@dataclass(frozen=True)
class CallTest:
    """Calls a function of the solution with arguments and compares its result."""

    name: str
    arguments: list[Any]
    expected: Any
    kind = "call"
    forgeable = False

    def blocks(self) -> list[dict[str, Any]]:
        limit = _output_limit(4 * len(json.dumps(self.expected)))
        return [{"kind": "call", "name": self.name, "arguments": self.arguments, "max_bytes": limit}]

    def passed(self, outcome: Outcome) -> bool:
        try:
            value = json.loads(outcome["report"])
        except ValueError:
            return False
        # Datasets contain the value itself, or a list with this value only.
        wrapped = isinstance(self.expected, list) and len(self.expected) == 1
        return same_value(value, self.expected) or (wrapped and same_value(value, self.expected[0]))


@dataclass(frozen=True)
class AssertTest:
    """Statements that must not raise. Reporting `token` proves that they were executed to their end.

    If `plan` allows it, a checker process executes them, otherwise the solution's process.
    """

    source: str
    token: str
    plan: ExecutionPlan

    @property
    def forgeable(self) -> bool:
        return self.plan.reason is not None

    @property
    def kind(self) -> str:
        return "assert" if self.forgeable else "checked"

    def blocks(self) -> list[dict[str, Any]]:
        statements = {"source": self.source, "token": self.token}
        if self.forgeable:
            return [{"kind": "assert", "max_bytes": 64}, statements]
        return [{**statements, **asdict(self.plan)}]

    def passed(self, outcome: Outcome) -> bool:
        return bool(outcome["report"] == self.token)


def _output_limit(expected: int) -> int:
    return max(_MIN_OUTPUT_LIMIT, 1 << (2 * expected).bit_length())


def read_tests(ground_truth: Any) -> list[Test]:
    """The tests of a ground truth; ValueError, with the reason, if there are none.

    Formats, as JSON text or as objects: `{"inputs": […], "outputs": […]}`, with `fn_name` for tests of a function
    (APPS, TACO, CodeContests); a list of `{"input": …, "output": …}` (LiveCodeBench); assertions as a list, or under
    `asserts` or `test_list` (MBPP); `{"test": "def check(candidate): …", "entry_point": …}` (HumanEval).
    """
    truth = _parse_json(ground_truth)
    if isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        return _asserts(truth)
    if isinstance(truth, list) and truth and all(isinstance(item, Mapping) for item in truth):
        return [
            test for item in truth for test in _in_out([item.get("input")], [item.get("output")], _function_name(item))
        ]
    if not isinstance(truth, Mapping):
        raise ValueError(f"ground_truth: expected tests as JSON, found {str(ground_truth)[:80]!r}.")
    if "inputs" in truth and "outputs" in truth:
        return _in_out(truth["inputs"], truth["outputs"], _function_name(truth))
    if "test" in truth and "entry_point" in truth:
        return [_humaneval(truth)]
    for name in _ASSERT_FIELDS:
        if truth.get(name):
            return _asserts(truth[name], _setup(truth))
    raise ValueError(
        f"ground_truth: it contains no tests (found: {', '.join(map(str, truth))}). It needs inputs and outputs, "
        "test_list, or test and entry_point."
    )


def _parse_json(ground_truth: Any) -> Any:
    if not isinstance(ground_truth, str):
        return ground_truth
    try:
        return json.loads(ground_truth)
    except ValueError as error:
        raise ValueError(f"ground_truth: the text is not JSON ({error}). Write the tests as JSON.") from error


def _function_name(truth: Mapping[str, Any]) -> str | None:
    return truth.get("fn_name") or None


def _setup(truth: Mapping[str, Any]) -> str:
    parts = [truth[name] for name in _SETUP_FIELDS if truth.get(name)]
    return "\n".join("\n".join(part) if not isinstance(part, str) else part for part in parts)


def _asserts(statements: Iterable[str], setup: str = "") -> list[Test]:
    sources = [f"{setup}\n{statement}" for statement in statements]
    return [AssertTest(source, secrets.token_hex(16), _plan(source, setup)) for source in sources]


def _humaneval(truth: Mapping[str, Any]) -> Test:
    entry_point = str(truth["entry_point"])
    source = f"{truth['test']}\ncheck({entry_point})"
    return AssertTest(source, secrets.token_hex(16), _plan(source, "", entry_point, str(truth.get("prompt") or "")))


# Cached: a group of responses has the same tests.
_plan = functools.lru_cache(maxsize=4096)(plan_execution)


def _in_out(inputs: Any, outputs: Any, name: str | None) -> list[Test]:
    inputs, outputs = list(inputs), list(outputs)
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"ground_truth: {len(inputs)} inputs and {len(outputs)} outputs. Each input needs its output.")
    if name is None:
        return [StdinTest(_lines(stdin), _lines(output)) for stdin, output in zip(inputs, outputs, strict=True)]
    return [CallTest(name, _arguments(values), _value(result)) for values, result in zip(inputs, outputs, strict=True)]


def _lines(text: Any) -> str:
    """Convert a list of lines, as in some datasets, to a text."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _arguments(values: Any) -> list[Any]:
    """The arguments of a call, from a list or from one line of JSON per argument."""
    if isinstance(values, str):
        return [_value(line) for line in values.splitlines() if line.strip()]
    return list(values) if isinstance(values, list | tuple) else [values]


def _value(text: Any) -> Any:
    if isinstance(text, str):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


# ---------------------------------------------------------------- comparison


def same_output(output: str, expected: str) -> bool:
    """Compare line by line without surrounding white space; words of a line may be equal as numbers."""
    lines, expected_lines = _stripped(output), _stripped(expected)
    return len(lines) == len(expected_lines) and all(
        line == other or _same_words(line.split(), other.split())
        for line, other in zip(lines, expected_lines, strict=True)
    )


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_words(words: list[str], expected: list[str]) -> bool:
    return len(words) == len(expected) and all(
        word == other or _same_number(word, other) for word, other in zip(words, expected, strict=True)
    )


def _same_number(word: str, expected: str) -> bool:
    """Integers must be equal as text: 10000000000000001 is not 1e16."""
    if expected.lstrip("+-").isdigit():
        return False
    try:
        number = float(expected)
        if math.isinf(number) and expected[-1].isdigit():  # 1e999 is not infinity
            return False
        return _close(float(word), number)
    except ValueError:
        return False


def _close(number: float, expected: float) -> bool:
    return number == expected or math.isclose(number, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(value: Any, expected: Any) -> bool:
    """Compare JSON values; floats may differ by rounding, and true is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or (isinstance(expected, float) and _close(value, expected))
    if isinstance(expected, tuple):
        expected = list(expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        fields = {str(name): item for name, item in expected.items()}
        return value.keys() == fields.keys() and all(same_value(value[name], fields[name]) for name in fields)
    return type(value) is type(expected) and value == expected
