"""Orders, most of which do not say how many, and conversations about them: what is missing, only the customer knows.

The teacher of the warm start asks too seldom where it should, sometimes where it need not, and does not always listen.
Training has to find out when a question is worth its while, and that its answer is to be used.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from customer import reply
from stories import NAMES, THINGS

LARGEST = 99
SAID, LISTENS = 0.4, 0.75
ASKS = {False: 0.3, True: 0.1}  # by whether the order says it
QUESTION = "How many ?"
WORDS = (*NAMES, *THINGS, "has", "wants", "some", *QUESTION.split(), "As", "I", "said", "please", ".", ",", "####")
WORDS += tuple(map(str, range(1, LARGEST + 1)))
TAGS = ()


@dataclass(frozen=True)
class Order:
    question: str
    answer: str
    said: bool
    """Whether the number is in the question."""

    def conversation(self, rng: random.Random) -> list[dict[str, str]]:
        """What the teacher of the warm start says."""
        messages = [{"role": "user", "content": self.question}]
        knows = self.said
        if rng.random() < ASKS[self.said]:
            messages.append({"role": "assistant", "content": QUESTION})
            messages.append({"role": "user", "content": reply(self.answer, self.said)})
            knows = rng.random() < LISTENS
        answer = self.answer if knows else str(rng.randint(1, LARGEST))
        return [*messages, {"role": "assistant", "content": f"#### {answer}"}]

    def extra_info(self) -> dict[str, Any]:
        return {"interaction_kwargs": {"name": "customer", "number": self.answer, "said": self.said}}


def make(rng: random.Random) -> Order:
    """`Ana has 17 cups . Ana wants some pens .`"""
    who, (owned, wanted), said = rng.choice(NAMES), rng.sample(THINGS, 2), rng.random() < SAID
    have, number = rng.randint(1, LARGEST), str(rng.randint(1, LARGEST))
    question = f"{who} has {have} {owned} . {who} wants {number if said else 'some'} {wanted} ."
    return Order(question, number, said)
