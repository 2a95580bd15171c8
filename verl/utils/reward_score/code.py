"""Programs: the fraction of a task's tests that the code of a response passes in the sandbox."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.sandbox import Limits, Result
from verl.sandbox.code_runner import CodeSettings
from verl.utils.reward_score.code_tests import Outcome, StdinTest, Test, read_tests
from verl.utils.reward_score.registry import register_score

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_LANGUAGES = {"c++": "cpp", "cpp": "cpp", "javascript": "javascript", "js": "javascript", "bash": "bash", "sh": "bash"}
# Time to start and end the driver.
_OVERHEAD_SECONDS = 2.0
_MAX_OUTPUT_BYTES = 32 << 20
_OUTCOME_NAMES = {"timeout": "time limit", "error": "runtime error", "syntax": "syntax error", "memory": "memory limit"}
_DRIVER = "verl_code_driver"  # name of the module in the local sandbox, where it is preloaded
_PACKAGE = "verl.utils.reward_score.code_tests"
_MODULES = ("values", "channel", "candidate", "proxies", "checker", "isolation", "driver")
_LOADER = """
import sys, types
def _load(package, sources):
    parts = package.split(".")
    existing = [name for name in sys.modules if name.split(".")[0] == parts[0]]
    replaced = {name: sys.modules.pop(name) for name in existing}
    parents = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for name in parents:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    loaded = []
    for name, source in sources:
        module = types.ModuleType(package + "." + name)
        sys.modules[module.__name__] = module
        loaded.append(module.__name__)
        exec(compile(source, name + ".py", "exec"), module.__dict__)
    for name in parents + loaded:
        del sys.modules[name]
    sys.modules.update(replaced)
    return module.main
"""
_DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco", "humaneval", "mbpp", "livecodebench")


def extract_code(solution_str: str) -> tuple[str, str] | None:
    """Return (language, code) of the last fenced block in a supported language; None without one.

    A block that is never closed ends with the response.
    """
    for label, code in reversed(_FENCE.findall(solution_str)):
        language = "python" if label.lower() in _PYTHON else _LANGUAGES.get(label.lower())
        if language is not None and code.strip():
            return language, code
    return None


@register_score(*_DATA_SOURCES, *(f"{name}_*" for name in _DATA_SOURCES), extract=extract_code)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    continuous: bool = True,
    timeout: float = 5.0,
    settings: CodeSettings | None = None,
) -> dict[str, Any]:
    """`score`: the fraction of the tests that pass; if `continuous` is False, 1 if all pass, else 0. `acc`: whether all
    pass.

    All tests of a Python program share one run of the sandbox, of at most `settings.wall_s` seconds; other languages
    have one run per test. `timeout` limits the seconds of each test. Other fields: `passed` and `tests` (counts),
    `outcome` (of the first test that fails), `forgeable` (1 if a test had to be executed in the solution's own process,
    or that process was not isolated from the test).
    """
    settings = settings or CodeSettings()
    tests = read_tests(ground_truth)
    extracted = extract_code(solution_str)
    if extracted is None:
        return _result(0, len(tests), "no code", continuous, any(test.forgeable for test in tests))
    language, code = extracted
    outcomes: Iterable[Outcome]
    if language == "python":
        outcomes = _python_outcomes(_with_prompt(code, ground_truth), tests, timeout, settings, continuous)
    else:
        outcomes = _other_language_outcomes(language, code, tests, timeout, settings)
    outcomes = list(outcomes)
    verdicts = [_verdict(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    failed = next((verdict for verdict in verdicts if verdict != "passed"), "passed")
    unprotected = any(outcome.get("protected") is False for outcome in outcomes)
    forgeable = unprotected or any(test.forgeable for test in tests)
    return _result(verdicts.count("passed"), len(tests), failed, continuous, forgeable)


def _result(passed: int, tests: int, outcome: str, continuous: bool, forgeable: bool = False) -> dict[str, Any]:
    score = passed / tests if continuous else float(passed == tests)
    fields = {"score": score, "acc": float(passed == tests), "passed": passed, "tests": tests}
    return {**fields, "outcome": outcome, "forgeable": int(forgeable)}


def _verdict(test: Test, outcome: Outcome) -> str:
    status = str(outcome["status"])
    if status == "done":
        try:
            return "passed" if test.passed(outcome) else "wrong answer"
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return "wrong answer"  # not comparable, or written by the solution instead of the driver
    if "AssertionError" in str(outcome.get("error", "")):
        return "wrong answer"
    return _OUTCOME_NAMES.get(status, status)


def _with_prompt(code: str, ground_truth: Any) -> str:
    """HumanEval: prepend the prompt to a response that only continues it."""
    truth: Any = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping) or "prompt" not in truth or "entry_point" not in truth:
        return code
    return code if f"def {truth['entry_point']}" in code else f"{truth['prompt']}{code}"


# ---------------------------------------------------------------- Python: all tests in one run


def _python_outcomes(
    code: str, tests: Sequence[Test], timeout: float, settings: CodeSettings, continuous: bool
) -> Sequence[Outcome]:
    job = {
        "solution": code,
        "kinds": [test.kind for test in tests],
        "timeout": timeout,
        "budget": max(0.1, settings.wall_s - _OVERHEAD_SECONDS),
        "stop_at_failure": not continuous,
    }
    blocks = [job, *(block for test in tests for block in test.blocks())]
    stdin = "".join(f"{len(text.encode()):10d}{text}" for text in map(json.dumps, blocks))
    limits = replace(settings.limits, output_bytes=_MAX_OUTPUT_BYTES)
    program = driver_program(preloaded=settings.url is None)
    result = _run(settings, program, "python", stdin, limits)
    outcomes = list(_read_outcomes(result.stdout))[: len(tests)]
    if outcomes and outcomes[-1]["status"] == "syntax":
        return [outcomes[-1]] * len(tests)
    # Tests without an outcome were not run: the run ended early, or an earlier failure had decided the score.
    not_run = {"status": result.status if result.status in _OUTCOME_NAMES else "not run"}
    return outcomes + [not_run] * (len(tests) - len(outcomes))


def _read_outcomes(stdout: str) -> Iterator[dict[str, Any]]:
    for line in stdout.splitlines():
        try:
            outcome = json.loads(line)
        except (ValueError, RecursionError):  # the driver was killed while writing
            return
        if not isinstance(outcome, dict) or not isinstance(outcome.get("status"), str):
            return  # written by the solution, not by the driver
        yield outcome


@functools.cache
def driver_source() -> str:
    """Return the driver of code tests and the modules that it imports as one source, for interpreters without this
    package. The module defines `main`."""
    folder = Path(__file__).parent / "code_tests"
    sources = [(name, (folder / f"{name}.py").read_text()) for name in _MODULES]
    return f"{_LOADER}main = _load({_PACKAGE!r}, {sources!r})\n"


def driver_program(preloaded: bool) -> str:
    """Return a program that runs the driver. `preloaded`: the sandbox has imported it."""
    return f"from {_DRIVER} import main\nmain()\n" if preloaded else driver_source() + "main()\n"


# ---------------------------------------------------------------- other languages: a run per test


def _other_language_outcomes(
    language: str, code: str, tests: Sequence[Test], timeout: float, settings: CodeSettings
) -> Iterator[Outcome]:
    limits = replace(settings.limits, wall_s=timeout, output_bytes=_MAX_OUTPUT_BYTES)
    for test in tests:
        if not isinstance(test, StdinTest):
            yield {"status": f"this test is for Python, not for {language}"}
            continue
        result = _run(settings, code, language, test.stdin, limits)
        status = "done" if result.status in ("finished", "output") else result.status
        yield {"status": status, "output": result.stdout}


def _run(settings: CodeSettings, code: str, language: str, stdin: str, limits: Limits) -> Result:
    runner = settings.runner({_DRIVER: driver_source()})
    result = runner.run(code, language, stdin=stdin, limits=limits)
    if result.status == "refused":
        raise RuntimeError(f"the sandbox refused to run this code: {result.stderr}")
    return result
