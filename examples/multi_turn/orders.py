"""Orders, most of which do not state a number, and conversations about them; only the customer knows the number.

The demonstrations of the warm start ask too seldom if the number is missing, sometimes ask without need, and do not
always use the reply. Training has to learn when to ask, and to use the reply.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from customer import reply
from stories import NAMES, THINGS

LARGEST = 99
STATED, USES_REPLY = 0.4, 0.75
ASKS = {False: 0.3, True: 0.1}  # by whether the order states the number
QUESTION = "How many ?"
WORDS = (*NAMES, *THINGS, "has", "wants", "some", *QUESTION.split(), "As", "I", "said", "please", ".", ",", "####")
WORDS += tuple(map(str, range(1, LARGEST + 1)))
TAGS = ()


@dataclass(frozen=True)
class Order:
    question: str
    answer: str
    stated: bool
    """Whether the question contains the number."""

    def conversation(self, rng: random.Random) -> list[dict[str, str]]:
        """A demonstration for the warm start."""
        messages = [{"role": "user", "content": self.question}]
        number_known = self.stated
        if rng.random() < ASKS[self.stated]:
            messages.append({"role": "assistant", "content": QUESTION})
            messages.append({"role": "user", "content": reply(self.answer, self.stated)})
            number_known = rng.random() < USES_REPLY
        answer = self.answer if number_known else str(rng.randint(1, LARGEST))
        return [*messages, {"role": "assistant", "content": f"#### {answer}"}]

    def extra_info(self) -> dict[str, Any]:
        return {"interaction_kwargs": {"name": "customer", "number": self.answer, "stated": self.stated}}


def make(rng: random.Random) -> Order:
    """`Ana has 17 cups . Ana wants some pens .`"""
    name, (owned, ordered), stated = rng.choice(NAMES), rng.sample(THINGS, 2), rng.random() < STATED
    have, number = rng.randint(1, LARGEST), str(rng.randint(1, LARGEST))
    question = f"{name} has {have} {owned} . {name} wants {number if stated else 'some'} {ordered} ."
    return Order(question, number, stated)
