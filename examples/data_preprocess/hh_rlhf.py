"""Preference data as prompts for reward-model runs: `train.parquet` and `test.parquet` from local jsonl or the hub.

    python examples/data_preprocess/hh_rlhf.py --local_save_dir ~/data/hh_rlhf \
        [--local_dataset_path ../shared/data/ultrafeedback]

Rows are {prompt, chosen, rejected}, or {chosen, rejected} as whole dialogues (Anthropic/hh-rlhf, MIT). In training the
policy responds to the prompt and the reward model scores the response; the answers of the row are kept for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import raw_data
from raw_data import Row

HUB_NAME = "Anthropic/hh-rlhf"
# Prefixes of the file names of a split: `train_clean.jsonl`, `eval.jsonl.gz`.
SPLITS = {"train": ("train",), "test": ("test", "eval", "valid")}
LAYOUT = "folder with train*.jsonl and test*.jsonl (or eval*, valid*; .json, .parquet, .jsonl.gz)"
ORIGIN = "Anthropic/hh-rlhf, or any set whose rows are {prompt, chosen, rejected}"
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def main() -> None:
    parser = raw_data.argument_parser(__doc__, "hh_rlhf", HUB_NAME, LAYOUT)
    parser.add_argument("--data_source", help="data_source of the rows; default: name of the dataset or folder")
    options = parser.parse_args()
    folder = options.local_dataset_path
    source = options.data_source or (raw_data.expanded(folder).resolve().name if folder else options.hub_name)
    for split, names in SPLITS.items():
        raw = raw_data.from_folder(folder, names, ORIGIN) if folder else raw_data.from_hub(options.hub_name, split)
        save_preferences(raw, options.local_save_dir, split, source)


def save_preferences(raw: Iterable[Row], folder: str, split: str, source: str) -> None:
    """Write the rows that have a prompt, and print the number of those that do not."""
    converted = [training_row(item, index, split, source) for index, item in enumerate(raw)]
    rows = [row for row in converted if row is not None]
    raw_data.save(rows, folder, split, f", {len(converted) - len(rows)} without a prompt left out")


def training_row(item: Row, index: int, split: str, source: str) -> Row | None:
    """One row in the schema of RL data, scored by a reward model; None if the prompt is empty."""
    for name in ("chosen", "rejected"):
        raw_data.field(item, name, f"{split} row {index}")
    *prompt, chosen = conversation(item, "chosen")
    *_, rejected = conversation(item, "rejected")
    if not any(message["content"] for message in prompt):
        return None
    extra_info = {"split": split, "index": index, "rejected": rejected["content"]}
    return raw_data.training_row(source, prompt, "alignment", chosen["content"], extra_info, style="model")


def conversation(item: Row, answer: str) -> list[Row]:
    """All messages of the row with `answer` (chosen or rejected) as the last one."""
    value = item[answer]
    if isinstance(value, list):  # already messages
        return [{"role": message["role"], "content": message["content"]} for message in value]
    if "prompt" not in item:
        return as_messages(value)
    prompt = as_messages(item["prompt"])
    if prompt[-1] == {"role": "assistant", "content": ""}:
        del prompt[-1]  # "…\n\nAssistant:" is the generation prompt
    return [*prompt, {"role": "assistant", "content": value.strip()}]


def as_messages(dialogue: str) -> list[Row]:
    """`\\n\\nHuman: … \\n\\nAssistant: …` as messages; any other text is a user message."""
    if not dialogue.lstrip().startswith("Human:"):
        return [{"role": "user", "content": dialogue.strip()}]
    _, *parts = _TURN.split(dialogue)
    return [{"role": _ROLES[role], "content": text.strip()} for role, text in zip(parts[::2], parts[1::2], strict=True)]


if __name__ == "__main__":
    main()
