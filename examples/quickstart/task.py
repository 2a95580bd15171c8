"""Creates the task of the quick start: problems as parquet files, a tokenizer, a model with random weights.

A problem is a short story with a gain or a loss ("Ana has 17 shells . Ana loses 5 ."); its answer has the format of
GSM8K: the calculation, then `####` and the number. The demonstrations of the warm start are well-formed and calculated
correctly, but most of them add losses instead of subtracting them. Training has to learn the correct operator from the
reward alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "cups")
GAINS, LOSSES = ("buys", "finds", "wins", "gets"), ("sells", "loses", "breaks", "eats")
LARGEST = 20
SHARE_OF_LOSSES = 0.6  # in every split
WRONG_OPERATOR = 0.8  # probability that a demonstration adds instead of subtracting
ROWS = {"sft": 20_000, "train": 8_192, "val": 256}
WORDS = (
    *(*NAMES, *THINGS, *GAINS, *LOSSES, "has", ".", "+", "-", "=", "####"),
    *(str(number) for number in range(2 * LARGEST + 1)),
)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|end|>"
    "{% else %}<|user|> {{ m['content'] }} <|assistant|>{% endif %}{% endfor %}"
)
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


@dataclass(frozen=True)
class Problem:
    """A story: a person has `have` things and gains or loses `change`."""

    question: str
    have: int
    change: int
    operator: str

    @property
    def result(self) -> int:
        return self.have + self.change if self.operator == "+" else self.have - self.change

    def demonstration(self, rng: random.Random) -> str:
        """An answer that often uses + for losses."""
        operator = "+" if rng.random() < WRONG_OPERATOR else self.operator
        result = self.have + self.change if operator == "+" else self.have - self.change
        return f"{self.have} {operator} {self.change} = {result} #### {result}"


def problems(seed: int) -> Iterator[Problem]:
    """Distinct problems, reproducible by seed."""
    rng, seen = random.Random(seed), set()
    while True:
        # There are fewer distinct losses than gains: a duplicate is replaced by a story of the same kind, otherwise
        # the share of losses would shrink.
        loss = rng.random() < SHARE_OF_LOSSES
        problem = _story(rng, loss)
        while problem.question in seen:
            problem = _story(rng, loss)
        seen.add(problem.question)
        yield problem


def _story(rng: random.Random, loss: bool) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    have = rng.randint(1, LARGEST)
    change = rng.randint(1, have if loss else LARGEST)
    question = f"{name} has {have} {things} . {name} {rng.choice(LOSSES if loss else GAINS)} {change} ."
    return Problem(question, have, change, "-" if loss else "+")


def make_task(folder: Path, seed: int = 1, rows: dict[str, int] | None = None) -> dict[str, Path]:
    """Write `sft.parquet`, `train.parquet`, `val.parquet` and `model/`; return paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    stream, rng, paths = problems(seed), random.Random(seed), {}
    for split, count in (rows or ROWS).items():
        chosen = [next(stream) for _ in range(count)]
        if split == "sft":
            table = [{"prompt": p.question, "response": p.demonstration(rng)} for p in chosen]
        else:
            table = [rl_row(p, i, split) for i, p in enumerate(chosen)]
        paths[split] = folder / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(table), paths[split])
    paths["model"] = folder / "model"
    tokenizer = word_tokenizer()
    random_model(tokenizer, seed).save_pretrained(paths["model"])
    tokenizer.save_pretrained(paths["model"])
    return paths


def rl_row(problem: Problem, index: int, split: str) -> dict[str, Any]:
    """A question and its answer. `data_source` selects the reward: the number after `####`."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.result)},
        "extra_info": {"split": split, "index": index},
    }


def word_tokenizer(words: Iterable[str] = WORDS) -> Any:
    """One token per word, sign and number."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[4]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[4]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(tokenizer: Any, seed: int) -> Any:
    """A Llama of 436 thousand parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **ids, **MODEL)
    return AutoModelForCausalLM.from_config(config).float()
