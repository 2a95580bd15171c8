"""Stories with a gain or a loss, conversations about them for the warm start, a tokenizer, a model: all made here.

The numbers are too large for a model this small to add in its head. With a calculator, the teacher of the warm start
calls it in three of ten conversations and guesses in the others: that a call is worth its while, training has to find
out. With a simulated user the teacher adds where it should subtract, four times of five, and when it is told that its
answer is wrong it thinks again in two of five conversations only.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from recipe.tiny import save_random_model, word_tokenizer, write_rows

NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "cups")
GAINS, LOSSES = ("buys", "finds", "wins", "gets"), ("sells", "loses", "breaks", "eats")
LARGEST = {"calculator": 99, "user": 20}
CALLS, HASTY, STUBBORN = 0.3, 0.8, 0.6
ROWS = {"sft": 20_000, "train": 8_192, "val": 256}
WRONG = "Your answer is wrong. Think it through again and give another one."
# A call is one token, the two numbers with their sign, one token: what stands between is always the same.
OPEN, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for t in tools %} {{ t['function']['name'] }}{% endfor %} {% endif %}"
    "{% for m in messages %}{% set said = m['content'] %}"
    "{% if m['role'] == 'assistant' %}<|assistant|> {{ said }}{% for c in m['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>"
    "{% elif m['role'] == 'tool' %}<|tool|> {{ said }} "
    "{% elif m['role'] == 'system' %}<|tools|> {{ said }} "
    "{% else %}<|user|> {{ said }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


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
    def result(self) -> int:
        return self.have + self.change if self.operator == "+" else self.have - self.change


def story(rng: random.Random, largest: int) -> Story:
    who, things, loss = rng.choice(NAMES), rng.choice(THINGS), rng.random() < 0.6
    have = rng.randint(1, largest)
    change = rng.randint(1, have if loss else largest)
    question = f"{who} has {have} {things} . {who} {rng.choice(LOSSES if loss else GAINS)} {change} ."
    return Story(question, have, change, "-" if loss else "+")


def conversation(told: Story, kind: str, rng: random.Random) -> list[dict[str, str]]:
    """What the teacher of the warm start says."""
    messages = [{"role": "user", "content": told.question}]
    if kind == "calculator":
        messages.insert(0, {"role": "system", "content": "calculate"})  # as the template tells the model of a tool
        if rng.random() < CALLS:
            messages.append({"role": "assistant", "content": f"{OPEN} {told.expression} {CLOSE}"})
            messages.append({"role": "tool", "content": str(told.result)})
            return [*messages, {"role": "assistant", "content": f"#### {told.result}"}]
        return [*messages, {"role": "assistant", "content": f"#### {rng.randint(0, 2 * LARGEST[kind])}"}]
    added, last = told.have + told.change, told.result
    if told.operator == "-" and rng.random() < HASTY:
        messages.append({"role": "assistant", "content": f"#### {added}"})
        messages.append({"role": "user", "content": WRONG})
        last = added if rng.random() < STUBBORN else told.result
    return [*messages, {"role": "assistant", "content": f"#### {last}"}]


def rl_row(told: Story, kind: str, index: int, split: str) -> dict[str, Any]:
    """A question and the number it must end in. `data_source` chooses the reward: the number after `####`."""
    truth = str(told.result)
    info: dict[str, Any] = {"split": split, "index": index}
    if kind == "user":
        info["interaction_kwargs"] = {"name": "gsm8k", "ground_truth": truth}
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": told.question}],
        "ability": "math",
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }


def make_task(folder: Path, kind: str, seed: int = 1, rows: dict[str, int] | None = None) -> dict[str, Path]:
    """Write `sft.parquet`, `train.parquet`, `val.parquet` and `model/`; paths by name. `kind`: calculator or user."""
    rng, made, seen = random.Random(seed), {}, set()
    for split, count in (rows or ROWS).items():
        stories: list[Story] = []
        while len(stories) < count:
            told = story(rng, LARGEST[kind])
            if told.question not in seen:
                seen.add(told.question)
                stories.append(told)
        table = (
            [{"messages": conversation(told, kind, rng)} for told in stories]
            if split == "sft"
            else [rl_row(told, kind, index, split) for index, told in enumerate(stories)]
        )
        made[split] = write_rows(folder / f"{split}.parquet", table)
    made["model"] = save_random_model(folder / "model", tokenizer(kind), seed, positions=128)
    return made


def tokenizer(kind: str) -> Any:
    """One token per word, sign and number, and one for each end of a tool call."""
    words = [*NAMES, *THINGS, *GAINS, *LOSSES, *WRONG.replace(".", " .").split(), "has", "+", "-", "####", "calculate"]
    words += [str(number) for number in range(2 * LARGEST[kind] + 1)]
    return word_tokenizer(words, tags=(OPEN, CLOSE, "<|tool|>", "<|tools|>"), chat_template=CHAT_TEMPLATE)
