"""Preference data as prompts for reward-model runs: `train.parquet` and `test.parquet` from local jsonl or the hub.

    python examples/data_preprocess/hh_rlhf.py --local_save_dir ~/data/hh_rlhf \
        [--local_dataset_path ../shared/data/ultrafeedback]

Rows are {prompt, chosen, rejected}, or {chosen, rejected} as whole dialogues (Anthropic/hh-rlhf, MIT). In training the
policy answers the prompt and the reward model judges that answer; the row's own answers stay beside for comparison.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HUB_NAME = "Anthropic/hh-rlhf"
# What a split may be called in file names: `train_clean.jsonl`, `eval.jsonl.gz`.
SPLITS = {"train": ("train",), "test": ("test", "eval", "valid")}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_save_dir", default="~/data/hh_rlhf", help="where the parquet files go")
    parser.add_argument("--local_dataset_path", help="folder with train*.jsonl and test*.jsonl (or eval*, valid*; .gz)")
    parser.add_argument("--hub_name", default=HUB_NAME, help="dataset to download where no local path is given")
    parser.add_argument("--data_source", help="name in the rows; default: that of the dataset or folder")
    options = parser.parse_args()
    folder = options.local_dataset_path and expanded(options.local_dataset_path)
    source = options.data_source or (folder.resolve().name if folder else options.hub_name)
    target = expanded(options.local_save_dir)
    target.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        raw = from_folder(folder, split) if folder else from_hub(options.hub_name, split)
        made = [training_row(item, index, split, source) for index, item in enumerate(raw)]
        rows = [row for row in made if row is not None]
        if not rows:
            raise SystemExit(
                f"{source} {split}: no usable row. It needs prompt, chosen and rejected; check the raw data."
            )
        pq.write_table(pa.Table.from_pylist(rows), target / f"{split}.parquet")
        print(f"{target / f'{split}.parquet'}: {len(rows)} rows, {len(made) - len(rows)} without a prompt left out")


def training_row(item: dict[str, Any], index: int, split: str, source: str) -> dict[str, Any] | None:
    """One row in the schema of RL data, judged by a model; None where there is nothing to ask."""
    for name in ("chosen", "rejected"):
        if name not in item:
            raise ValueError(f"{split} row {index}: no {name!r} (found: {', '.join(item)}). Give preference data.")
    *prompt, chosen = conversation(item, "chosen")
    *_, rejected = conversation(item, "rejected")
    if not any(message["content"] for message in prompt):
        return None
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": chosen["content"]},
        "extra_info": {"split": split, "index": index, "rejected": rejected["content"]},
    }


def conversation(item: dict[str, Any], answer: str) -> list[dict[str, str]]:
    """All messages of the row with `answer` (chosen or rejected) as the last one."""
    given = item[answer]
    if isinstance(given, list):  # already messages
        return [{"role": message["role"], "content": message["content"]} for message in given]
    if "prompt" not in item:
        return as_messages(given)
    prompt = as_messages(item["prompt"])
    if prompt[-1] == {"role": "assistant", "content": ""}:
        del prompt[-1]  # "…\n\nAssistant:" waits for the answer
    return [*prompt, {"role": "assistant", "content": given.strip()}]


def as_messages(text: str) -> list[dict[str, str]]:
    """`\\n\\nHuman: … \\n\\nAssistant: …` as messages; any other text is what the user says."""
    if not text.lstrip().startswith("Human:"):
        return [{"role": "user", "content": text.strip()}]
    _, *parts = _TURN.split(text)
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def from_folder(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    files = sorted(
        file
        for pattern in ("*.jsonl", "*.jsonl.gz")
        for file in folder.glob(pattern)
        if file.name.startswith(SPLITS[split])
    )
    if not files:
        names = ", ".join(f"{name}*.jsonl" for name in SPLITS[split])
        raise SystemExit(f"--local_dataset_path: {folder} has no {names}. Each line is {{prompt, chosen, rejected}}.")
    for file in files:
        unpack = gzip.open if file.suffix == ".gz" else open
        with unpack(file, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def from_hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(name, split=split)
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        raise SystemExit(
            f"{name}: the hub cannot be reached ({error}). On a machine with access run: "
            f"hf download --repo-type dataset {name}; or give --local_dataset_path."
        ) from error


def expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


if __name__ == "__main__":
    main()
