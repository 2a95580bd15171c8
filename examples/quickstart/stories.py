"""Short stories with a number at the end: arithmetic word problems, right answers, and hasty ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe", "Max", "Amy", "Jim", "Kim", "Dan", "Liz", "Joe", "Sue")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "balls", "cups", "eggs", "stones", "plums")
BOXES = ("boxes", "bags", "crates", "jars")
GAINS = ("{who} buys", "{who} finds", "{who} wins", "{who} collects", "{other} gives {who}", "{other} brings {who}")
LOSSES = ("{who} sells", "{who} loses", "{who} breaks", "{who} hides", "{who} gives {other}", "{who} sends {other}")
RESULT_OF: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
# How often the hasty solver subtracts or multiplies where the story says so.
READS_WELL = 0.45


@dataclass(frozen=True)
class Problem:
    """A question; its answer starts from a number and takes one or two steps, each an operator and a number."""

    question: str
    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def result(self) -> int:
        """The right number."""
        return self._walk(lambda operator: operator)[1]

    def solution(self) -> str:
        """The right answer: `23+5=28, 28-3=25 #### 25`."""
        return self._walk(lambda operator: operator)[0]

    def hasty_solution(self, rng: random.Random) -> str:
        """Well-formed and calculated without mistakes, but of what is not an addition, most is added all the same."""
        return self._walk(lambda operator: operator if rng.random() < READS_WELL else "+")[0]

    def _walk(self, choose: Callable[[str], str]) -> tuple[str, int]:
        value, lines = self.start, []
        for right, number in self.steps:
            operator = choose(right)
            result = RESULT_OF[operator](value, number)
            lines.append(f"{value}{operator}{number}={result}")
            value = result
        return f"{', '.join(lines)} #### {value}", value


def problems(seed: int) -> Iterator[Problem]:
    """Different problems, without end; the same ones for the same seed."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        problem = _problem(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _problem(rng: random.Random) -> Problem:
    who, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    in_boxes = rng.random() < 0.25
    steps: list[tuple[str, int]] = []
    if in_boxes:
        start, each = rng.randint(2, 6), rng.randint(2, 6)
        steps.append(("*", each))
        sentences = [f"{who} has {start} {rng.choice(BOXES)} of {each} {things}."]
        # Small enough that no choice of operators goes below zero.
        largest = start + each - 1
    else:
        start = rng.randint(10, 20)
        sentences = [f"{who} has {start} {things}."]
        largest = 5
    for _ in range(rng.choice((1, 2, 2)) - len(steps)):
        number = rng.randint(1, min(5, largest))
        operator = rng.choice("+-")
        event = rng.choice(GAINS if operator == "+" else LOSSES).format(who=who, other=other)
        steps.append((operator, number))
        sentences.append(f"{event} {number}.")
    sentences.append(f"How many {things} now?")
    return Problem(" ".join(sentences), start, tuple(steps))
