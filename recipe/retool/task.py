"""The tiny task: products that a small model cannot compute, and a Python interpreter that can.

    python -m recipe.retool.task --folder runs/retool/task

The demonstrations of the warm start write correct programs and use their output, but most of the time they guess;
training has to learn from the reward alone that running code pays off.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from recipe.tiny import char_tokenizer, save_random_model, write_rows

# Constant text is one token.
CALL = ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(', ')"}}</tool_call>')
TAGS = (*CALL, "What is ", "#### ", " * ", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RUNS_CODE = 0.2  # share of demonstrations that run code
SMALLEST, LARGEST = 11, 99
ROWS = {"sft": 12_000, "train": 1_536, "val": 256}


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} * {b}?"}]


def demonstration(a: int, b: int, rng: random.Random) -> dict[str, Any]:
    """A tool call, its result and the answer; or a random answer."""
    if rng.random() < RUNS_CODE:
        result = a * b
        calls = [
            {"role": "assistant", "content": f"{CALL[0]}{a} * {b}{CALL[1]}"},
            {"role": "tool", "content": str(result)},
        ]
    else:
        result, calls = rng.randint(SMALLEST, LARGEST) * rng.randint(SMALLEST, LARGEST), []
    return {"messages": [*question(a, b), *calls, {"role": "assistant", "content": f"#### {result}"}]}


def problem_row(a: int, b: int, index: int, split: str) -> dict[str, Any]:
    """A training problem; `data_source` selects the reward, the number after `####`."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": question(a, b),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "agent_name": "tool_agent",
        "extra_info": {"split": split, "index": index},
    }


def make_task(folder: Path, seed: int = 1, rows: dict[str, int] | None = None) -> None:
    """Write `sft.parquet`, `train.parquet`, `val.parquet` and `model/`; validation problems are in no other file."""
    rows, rng = rows or ROWS, random.Random(seed)
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    rng.shuffle(pairs)
    val, train = pairs[: rows["val"]], pairs[rows["val"] : rows["val"] + rows["train"]]
    for split, chosen in (("val", val), ("train", train)):
        write_rows(folder / f"{split}.parquet", [problem_row(*pair, i, split) for i, pair in enumerate(chosen)])
    remaining = pairs[rows["val"] :]
    write_rows(folder / "sft.parquet", [demonstration(*rng.choice(remaining), rng) for _ in range(rows["sft"])])
    save_random_model(folder / "model", char_tokenizer(TAGS, CHAT_TEMPLATE), seed, positions=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/retool/task"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_task(options.folder, options.seed)
    print(f"created without downloads: {options.folder}")


if __name__ == "__main__":
    main()
