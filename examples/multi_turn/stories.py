"""Stories with a gain or a loss, and conversations about them, with numbers too large for a small model to add.

The demonstrations of the warm start call the calculator in three of ten conversations and guess in the others; training
has to learn that calls pay off.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "cups")
GAINS, LOSSES = ("buys", "finds", "wins", "gets"), ("sells", "loses", "breaks", "eats")
LARGEST = 99
CALLS = 0.3  # share of demonstrations that call the calculator
# The constant parts of a call are one token each.
OPEN, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
TAGS = (OPEN, CLOSE)
WORDS = (*NAMES, *THINGS, *GAINS, *LOSSES, "has", ".", "+", "-", "####", "calculate")
WORDS += tuple(map(str, range(2 * LARGEST + 1)))


@dataclass(frozen=True)
class Story:
    question: str
    have: int
    change: int
    operator: str

    @property
    def expression(self) -> str:
        return f"{self.have} {self.operator} {self.change}"

    @property
    def answer(self) -> str:
        return str(self.have + self.change if self.operator == "+" else self.have - self.change)

    def conversation(self, rng: random.Random) -> list[dict[str, str]]:
        """A demonstration for the warm start."""
        system = {"role": "system", "content": "calculate"}  # same text as the tool list of the chat template
        messages = [system, {"role": "user", "content": self.question}]
        if rng.random() >= CALLS:
            return [*messages, {"role": "assistant", "content": f"#### {rng.randint(0, 2 * LARGEST)}"}]
        messages.append({"role": "assistant", "content": f"{OPEN} {self.expression} {CLOSE}"})
        messages.append({"role": "tool", "content": self.answer})
        return [*messages, {"role": "assistant", "content": f"#### {self.answer}"}]

    def extra_info(self) -> dict[str, Any]:
        return {}


def make(rng: random.Random) -> Story:
    """`Ana has 17 shells . Ana loses 5 .`"""
    name, things, loss = rng.choice(NAMES), rng.choice(THINGS), rng.random() < 0.6
    have = rng.randint(1, LARGEST)
    change = rng.randint(1, have if loss else LARGEST)
    question = f"{name} has {have} {things} . {name} {rng.choice(LOSSES if loss else GAINS)} {change} ."
    return Story(question, have, change, "-" if loss else "+")
