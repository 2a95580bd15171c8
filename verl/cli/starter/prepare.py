"""Create the data and a tiny model: `python prepare.py`. Nothing is downloaded.

Replace `problems` by your own task; for a real model, delete everything that creates a tokenizer and a model.

The task: short stories with numbers that are too large for a tiny model to add, and a calculator. Three of ten
demonstrations call the calculator, the others guess; reinforcement learning has to find out that calls pay off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
DATA, MODEL = HERE / "data", HERE / "model"
ROWS = {"sft": 20_000, "train": 8_192, "val": 256}
CALLS = 0.3  # share of demonstrations that call the calculator

NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "cups")
GAINS, LOSSES = ("buys", "finds", "wins", "gets"), ("sells", "loses", "breaks", "eats")
LARGEST = 99
# The constant parts of a tool call are one token each for the tiny model; a real model writes them itself.
OPEN, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'


def problems(seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (question, expression, answer); no question occurs twice."""
    rng, seen = random.Random(seed), set()
    while True:
        name, things, loss = rng.choice(NAMES), rng.choice(THINGS), rng.random() < 0.6
        have = rng.randint(1, LARGEST)
        change = rng.randint(1, have if loss else LARGEST)
        question = f"{name} has {have} {things} . {name} {rng.choice(LOSSES if loss else GAINS)} {change} ."
        if question not in seen:
            seen.add(question)
            answer = have - change if loss else have + change
            yield question, f"{have} {'-' if loss else '+'} {change}", str(answer)


def rl_row(question: str, answer: str, index: int) -> dict[str, Any]:
    """A row for reinforcement learning: the prompt, and what the reward function needs."""
    return {
        "data_source": "my_task",
        "prompt": [{"role": "user", "content": question}],
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def demonstration(question: str, expression: str, answer: str, rng: random.Random) -> dict[str, Any]:
    """A conversation for the supervised warm start, with a tool call or a guess."""
    # The chat template of the tiny model lists the tools as a system message does.
    messages = [{"role": "system", "content": "calculate"}, {"role": "user", "content": question}]
    if rng.random() < CALLS:
        messages.append({"role": "assistant", "content": f"{OPEN} {expression} {CLOSE}"})
        messages.append({"role": "tool", "content": answer})
    else:
        answer = str(rng.randint(0, 2 * LARGEST))
    return {"messages": [*messages, {"role": "assistant", "content": f"#### {answer}"}]}


def write_data(seed: int = 1) -> None:
    """Write data/sft.parquet, data/train.parquet and data/val.parquet."""
    DATA.mkdir(exist_ok=True)
    stream, rng = problems(seed), random.Random(seed)
    for split, count in ROWS.items():
        chosen = [next(stream) for _ in range(count)]
        if split == "sft":
            table = [demonstration(*problem, rng) for problem in chosen]
        else:
            table = [rl_row(question, answer, index) for index, (question, _, answer) in enumerate(chosen)]
        pq.write_table(pa.Table.from_pylist(table), DATA / f"{split}.parquet")


# ---------------------------------------------------------------- only for the tiny model

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>")
TAGS = (OPEN, CLOSE, "<|tool|>", "<|tools|>")  # one token each, but text: decoding keeps them
WORDS = (*NAMES, *THINGS, *GAINS, *LOSSES, "has", ".", "+", "-", "####", "calculate")
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
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_model(seed: int = 1) -> None:
    """Write model/: a tokenizer with one token per word and number, and a Llama with random weights."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = [*SPECIAL, *TAGS, *WORDS, *map(str, range(2 * LARGEST + 1))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unknown|>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<|unknown|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **SIZES,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


if __name__ == "__main__":
    write_data()
    write_model()
    print(f"created {DATA} and {MODEL}")
