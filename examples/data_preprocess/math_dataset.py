"""MATH as training data, with MATH-500 and AIME 2024 to validate on: `train`, `test` and `aime24.parquet`.

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math \
        [--local_dataset_path ../shared/data/math]

A local folder holds `train*.json`, `math500.jsonl` and `aime24.jsonl` with problem and answer, or with a solution that
boxes it (Hendrycks et al., arXiv 2103.03874). Sets that are not there are left out, but the training set must be; so
are problems without an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import dapo_math
import raw_data
from raw_data import Row

from verl.utils.reward_score import last_boxed_only_string, remove_boxed

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


@dataclass(frozen=True)
class Set:
    """Where one set comes from, and which reward scores it."""

    split: str
    data_source: str
    file: str
    hub_name: str
    hub_split: str


SETS = (
    Set("train", "lighteval/MATH", "train", HUB_NAME, "train"),
    Set("test", "HuggingFaceH4/MATH-500", "math500", "HuggingFaceH4/MATH-500", "test"),
    Set("aime24", "aime24", "aime24", "HuggingFaceH4/aime_2024", "train"),
)


def main() -> None:
    layout = "folder with train*.json, math500.jsonl and aime24.jsonl"
    options = raw_data.argument_parser(__doc__, "math", HUB_NAME, layout).parse_args()
    folder = options.local_dataset_path
    for one in SETS:
        if folder and one.split != "train" and not raw_data.local_files(folder, [one.file]):
            print(f"{one.file}: not in {folder}; {one.split}.parquet is left out")
            continue
        name = options.hub_name if one.split == "train" else one.hub_name
        raw = (
            raw_data.from_folder(folder, [one.file], f"{name} on the hub")
            if folder
            else raw_data.from_hub(name, one.hub_split)
        )
        made = [training_row(item, index, one) for index, item in enumerate(raw)]
        rows = [row for row in made if row is not None]
        raw_data.save(rows, options.local_save_dir, one.split, f", {len(made) - len(rows)} without an answer left out")


def training_row(item: Row, index: int, one: Set) -> Row | None:
    """One row in the schema of RL data, None without an answer; AIME is asked and scored as DAPO does it."""
    problem = raw_data.field(item, "problem", f"{one.split} row {index}")
    answer = answer_of(item)
    if answer is None:
        return None
    known = ("level", "subject", "type", "difficulty")
    extra_info = {"split": one.split, "index": index, **{name: item[name] for name in known if name in item}}
    prompt = dapo_math.asked(problem) if one.data_source == "aime24" else f"{problem} {INSTRUCTION}"
    return raw_data.training_row(one.data_source, prompt, "math", answer, extra_info)


def answer_of(item: Row) -> str | None:
    """The answer, or what the solution puts into its last box; None if there is neither."""
    if item.get("answer"):
        return str(item["answer"])
    boxed = last_boxed_only_string(item.get("solution") or "")
    return None if boxed is None else remove_boxed(boxed)


if __name__ == "__main__":
    main()
