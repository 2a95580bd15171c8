"""Creates the data of a run: conversations for the warm start, rows for training, a tokenizer, a random model."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import orders
import stories

from recipe.tiny import save_random_model, word_tokenizer, write_rows

TASKS = {"calculator": stories, "mcp": stories, "user": orders}
ROWS = {"sft": 20_000, "train": 8_192, "val": 256}
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for t in tools %} {{ t['function']['name'] }}{% endfor %} {% endif %}"
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' %}<|assistant|> {{ content }}{% for c in m['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>"
    "{% elif m['role'] == 'tool' %}<|tool|> {{ content }} "
    "{% elif m['role'] == 'system' %}<|tools|> {{ content }} "
    "{% else %}<|user|> {{ content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_task(folder: Path, kind: str, seed: int = 1, rows: dict[str, int] | None = None) -> dict[str, Path]:
    """Write `sft.parquet`, `train.parquet`, `val.parquet` (distinct problems) and `model/`; return paths by name."""
    rng, paths, seen = random.Random(seed), {}, set()
    for split, count in (rows or ROWS).items():
        table: list[dict[str, Any]] = []
        while len(table) < count:
            problem = TASKS[kind].make(rng)
            if problem in seen:
                continue
            seen.add(problem)
            if split == "sft":
                table.append({"messages": problem.conversation(rng)})
            else:
                table.append(rl_row(problem, len(table), split))
        paths[split] = write_rows(folder / f"{split}.parquet", table)
    paths["model"] = save_random_model(folder / "model", tokenizer(kind), seed, positions=128)
    return paths


def rl_row(problem: stories.Story | orders.Order, index: int, split: str) -> dict[str, Any]:
    """A question and its answer. `data_source` selects the reward: the number after `####`."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, **problem.extra_info()},
    }


def tokenizer(kind: str) -> Any:
    """One token per word, sign, number and constant part of a tool call."""
    task = TASKS[kind]
    return word_tokenizer(task.WORDS, tags=(*task.TAGS, "<|tool|>", "<|tools|>"), chat_template=CHAT_TEMPLATE)
