"""Problems of a configuration, collected and raised together, and helpers for their text, such as install commands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").is_file()
_EXTRA = re.compile(r"(?:make setup-\S+, or )?pip install -e \.\[(\w+)\]")
# "vllm>=0.24; extra == \"vllm\"": the requirement, and the extra that adds it.
_REQUIREMENT = re.compile(r"(?P<package>[^;]+?) *;.*extra == [\"'](?P<extra>\w+)[\"']")


@dataclass(frozen=True)
class Problem:
    """One problem: the key, its value, the cause (`why`) and the remedy (`fix`)."""

    key: str
    value: Any
    why: str
    fix: str
    # Other keys in the cause: if one of them is already reported as invalid, this problem is suppressed.
    involves: tuple[str, ...] = field(default=(), repr=False, compare=False)
    # The alias of the key that the user has set, if any.
    alias: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        key = f"{self.key} (given as {self.alias})" if self.alias else self.key
        return f"{key} = {show(self.value)}: {self.why}. {self.fix}" + ("" if self.fix.endswith("?") else ".")


@dataclass(frozen=True)
class FormattedProblem(Problem):
    """A problem whose `why` is the complete message, with location (file, row, line) and remedy; `fix` is unused."""

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


class ConfigError(ValueError):
    """Invalid configuration; `problems` contains all problems, `str()` is a numbered list."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count != 1 else ''} in the configuration:"]
        lines += [f"{number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,), self.__dict__


class Report:
    """Collects problems and notices while a configuration is loaded."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self._invalid_keys: set[str] = set()
        self._aliases: dict[str, str] = {}  # key -> the alias that the user has set

    def problem(self, key: str, value: Any, why: str, fix: str, involves: Iterable[str] = ()) -> None:
        self.add(Problem(key, value, why, fix, tuple(involves)))

    def formatted_problem(self, key: str, value: Any, message: str) -> None:
        """Report a problem whose `message` already contains the location and the remedy."""
        self.add(FormattedProblem(key, value, message, ""))

    def add(self, problem: Problem) -> None:
        """Add `problem`, unless its key or one in `involves`, or a block of these, is already reported as invalid."""
        if not any(self._is_invalid(key) for key in (problem.key, *problem.involves)):
            self.problems.append(replace(problem, alias=self._aliases.get(problem.key)))

    def invalid(self, key: str, value: Any, why: str, fix: str) -> None:
        """Report an invalid value and suppress all later problems that involve this key."""
        self.problem(key, value, why, fix)
        self._invalid_keys.add(key)

    def record_alias(self, key: str, alias: str) -> None:
        """Record that the user has set the key by an alias: problems of the key name both."""
        self._aliases[key] = alias

    def _is_invalid(self, key: str) -> bool:
        return any(key == invalid or key.startswith(f"{invalid}.") for invalid in self._invalid_keys)

    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def raise_if_any(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)


def show(value: Any, limit: int = 120) -> str:
    """Format a value as in YAML or on the command line, truncated to `limit` characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


_SHORT_NAME = 5  # characters


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def near_values(values: list[int], target: int) -> str:
    """Format the values next to `target`: `64 or 128`."""
    below = [value for value in values if value <= target][-1:]
    above = [value for value in values if value > target][:1]
    return " or ".join(str(value) for value in below + above)


def count(number: int, noun: str) -> str:
    """Format a count: `1 rank`, `2 ranks`, `2 batches`."""
    plural = "es" if noun.endswith("batch") else "s"
    return f"{number} {noun}" + ("" if number == 1 else plural)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` probably is a misspelling of, or None.

    Short names must have the same first letter, because one letter changes their meaning (`dpo`, `gdpo`).
    """
    candidates = [other for other in known if len(name) > _SHORT_NAME or other[:1].lower() == name[:1].lower()]
    near = difflib.get_close_matches(name, candidates, n=1)
    return near[0] if near else None


def install_command(command: str) -> str:
    """Return `command` (`pip install -e .[extra]`, perhaps after `make setup-extra, or`) for this installation.

    Outside of a checkout it names the requirements of the extra: the name of this package could be that of another one
    on the package index.
    """
    match = _EXTRA.fullmatch(command)
    if IN_CHECKOUT or match is None:
        return command
    packages = requirements_of(match[1])
    return f"pip install {' '.join(packages)}" if packages else command


def requirements_of(extra: str) -> list[str]:
    """Return the quoted requirements that an extra of the installed package adds."""
    import importlib.metadata  # --help need not import it

    try:
        declared = importlib.metadata.requires("verl") or ()
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH only
        return []
    matches = (_REQUIREMENT.fullmatch(text) for text in declared)
    return [f'"{match["package"]}"' for match in matches if match is not None and match["extra"] == extra]
