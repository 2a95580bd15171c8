"""GSM8K as training data: `train.parquet` and `test.parquet` from local jsonl files or from the hub.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k [--local_dataset_path ../shared/data/gsm8k]

The raw data is openai/grade-school-math (MIT): `train.jsonl` and `test.jsonl` with question and answer (`… #### N`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.reward_score.gsm8k import extract_solution

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_save_dir", default="~/data/gsm8k", help="where the parquet files go")
    parser.add_argument("--local_dataset_path", help="folder with train.jsonl and test.jsonl; default: the hub")
    parser.add_argument("--hub_name", default=DATA_SOURCE, help="dataset to download where no local path is given")
    options = parser.parse_args()
    target = Path(os.path.expandvars(options.local_save_dir)).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        raw = (
            from_folder(options.local_dataset_path, split)
            if options.local_dataset_path
            else from_hub(options.hub_name, split)
        )
        rows = [training_row(item, index, split) for index, item in enumerate(raw)]
        pq.write_table(pa.Table.from_pylist(rows), target / f"{split}.parquet")
        print(f"{target / f'{split}.parquet'}: {len(rows)} rows")


def training_row(item: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """One row in the schema of RL data: who asks what, and what the reward compares with."""
    answer = extract_solution(item["answer"])
    if answer is None:
        raise ValueError(f"{split} row {index}: the answer has no '#### N' at its end. Check the raw data.")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{item['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": item["question"], "answer": item["answer"]},
    }


def from_folder(folder: str, split: str) -> Iterator[dict[str, Any]]:
    file = Path(os.path.expandvars(folder)).expanduser() / f"{split}.jsonl"
    if not file.is_file():
        raise SystemExit(f"--local_dataset_path: there is no {file}. It comes from openai/grade-school-math.")
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def from_hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(name, "main", split=split)
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        raise SystemExit(
            f"{name}: the hub cannot be reached ({error}). On a machine with access run: "
            f"hf download --repo-type dataset {name}; or give --local_dataset_path."
        ) from error


if __name__ == "__main__":
    main()
