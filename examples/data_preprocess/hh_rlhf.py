"""Preference data as prompts for reward-model runs: `train.parquet` and `test.parquet` from local jsonl or the hub.

    python examples/data_preprocess/hh_rlhf.py --local_save_dir ~/data/hh_rlhf \
        [--local_dataset_path ../shared/data/ultrafeedback]

Rows are {prompt, chosen, rejected}, or {chosen, rejected} as whole dialogues (Anthropic/hh-rlhf, MIT). In training the
policy answers the prompt and the reward model judges that answer; the row's own answers stay beside for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import raw_data
from raw_data import Row

HUB_NAME = "Anthropic/hh-rlhf"
# What a split may be called in file names: `train_clean.jsonl`, `eval.jsonl.gz`.
SPLITS = {"train": ("train",), "test": ("test", "eval", "valid")}
LAYOUT = "folder with train*.jsonl and test*.jsonl (or eval*, valid*; .json, .parquet, .jsonl.gz)"
COMES_FROM = "Anthropic/hh-rlhf, or any set whose rows are {prompt, chosen, rejected}"
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def main() -> None:
    parser = raw_data.argument_parser(__doc__, "hh_rlhf", HUB_NAME, LAYOUT)
    parser.add_argument("--data_source", help="name in the rows; default: that of the dataset or folder")
    options = parser.parse_args()
    folder = options.local_dataset_path
    source = options.data_source or (raw_data.expanded(folder).resolve().name if folder else options.hub_name)
    for split, names in SPLITS.items():
        raw = raw_data.from_folder(folder, names, COMES_FROM) if folder else raw_data.from_hub(options.hub_name, split)
        save_preferences(raw, options.local_save_dir, split, source)


def save_preferences(raw: Iterable[Row], folder: str, split: str, source: str) -> None:
    """Write the rows that ask something, and say how many did not."""
    made = [training_row(item, index, split, source) for index, item in enumerate(raw)]
    rows = [row for row in made if row is not None]
    raw_data.save(rows, folder, split, f", {len(made) - len(rows)} without a prompt left out")


def training_row(item: Row, index: int, split: str, source: str) -> Row | None:
    """One row in the schema of RL data, judged by a model; None where there is nothing to ask."""
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
    given = item[answer]
    if isinstance(given, list):  # already messages
        return [{"role": message["role"], "content": message["content"]} for message in given]
    if "prompt" not in item:
        return as_messages(given)
    prompt = as_messages(item["prompt"])
    if prompt[-1] == {"role": "assistant", "content": ""}:
        del prompt[-1]  # "…\n\nAssistant:" waits for the answer
    return [*prompt, {"role": "assistant", "content": given.strip()}]


def as_messages(text: str) -> list[Row]:
    """`\\n\\nHuman: … \\n\\nAssistant: …` as messages; any other text is what the user says."""
    if not text.lstrip().startswith("Human:"):
        return [{"role": "user", "content": text.strip()}]
    _, *parts = _TURN.split(text)
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


if __name__ == "__main__":
    main()
