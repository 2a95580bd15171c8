"""Everything the quick start trains on, made here: problems as parquet files, a tokenizer, a model with random weights.

    python examples/quickstart/make_task.py --folder runs/quickstart
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from stories import Problem, problems  # noqa: E402

DATA_SOURCE = "openai/gsm8k"  # names the reward: the number after `####` is compared
ROWS = {"sft": 20_000, "train": 10_000, "val": 256}
PAD, END, USER, ASSISTANT = SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|end|>"
    "{% else %}<|user|>{{ m['content'] }}<|assistant|>{% endif %}{% endfor %}"
)
VOCABULARY = 400
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"), help="where the files go")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in make_task(options.folder, options.seed):
        print(line)


def make_task(folder: Path, seed: int = 1, rows: dict[str, int] = ROWS) -> list[str]:
    """Write `data/{sft,train,val}.parquet` and `model_0/`; returns what was made, a line each."""
    made = []
    stream = problems(seed)
    rng = random.Random(seed)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    samples = []
    for split, count in rows.items():
        chosen = list(islice(stream, count))
        as_row = (lambda p, i: sft_row(p, rng)) if split == "sft" else (lambda p, i, s=split: rl_row(p, i, s))
        samples += [f"{p.question} {p.solution()}" for p in chosen[:2000]]
        path = folder / "data" / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist([as_row(p, i) for i, p in enumerate(chosen)]), path)
        made.append(f"{path}: {count} problems")
    tokenizer = train_tokenizer(samples)
    model = random_model(tokenizer, seed)
    model.save_pretrained(folder / "model_0")
    tokenizer.save_pretrained(folder / "model_0")
    made.append(f"{folder / 'model_0'}: {len(tokenizer)} tokens, {model.num_parameters():,} random parameters")
    return made


def sft_row(problem: Problem, rng: random.Random) -> dict[str, Any]:
    """A demonstration for the warm start."""
    return {"prompt": problem.question, "response": problem.hasty_solution(rng)}


def rl_row(problem: Problem, index: int, split: str) -> dict[str, Any]:
    """A question and the number it must end in; how to get there is for the policy to find out."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.result)},
        "extra_info": {"split": split, "index": index},
    }


def train_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE (any text round-trips) in which every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(tokenizer: Any, seed: int) -> Any:
    """A Qwen2 of about half a million parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **MODEL,
    )
    return AutoModelForCausalLM.from_config(config).float()


if __name__ == "__main__":
    main()
