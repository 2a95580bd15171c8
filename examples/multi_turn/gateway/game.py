"""The guessing game: secrets from 1 to 7 as parquet files, a word tokenizer, a model with random weights."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[2] / "quickstart"))
from task import random_model, word_tokenizer

LARGEST = 7
ROWS = {"train": 4096, "val": 70}


def make_game(folder: Path, seed: int = 1) -> None:
    """Write `train.parquet`, `val.parquet` and `model/`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for split, count in ROWS.items():
        secrets = [1 + row % LARGEST if split == "val" else rng.randint(1, LARGEST) for row in range(count)]
        rows = [
            {
                "data_source": "guessing",
                "prompt": [{"role": "user", "content": "guess"}],
                "ability": "search",
                "reward_model": {"style": "agent", "ground_truth": str(secret)},
                "extra_info": {"split": split, "index": index},
            }
            for index, secret in enumerate(secrets)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    tokenizer = word_tokenizer([str(number) for number in range(1, LARGEST + 1)] + ["guess", "higher", "lower"])
    random_model(tokenizer, seed).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    make_game(Path(sys.argv[1]))
