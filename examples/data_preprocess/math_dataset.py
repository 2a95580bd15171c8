"""MATH as training data, with MATH-500 and AIME 2024 for validation: `train`, `test` and `aime24.parquet`.

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math \
        [--local_dataset_path ../shared/data/math]

A local folder contains `train*.json`, `math500.jsonl` and `aime24.jsonl` with problem and answer, or with a solution
that boxes the answer (Hendrycks et al., arXiv 2103.03874). The training set is required, missing validation sets are
left out, and so are problems without an answer.
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
class Source:
    """Where the rows of a split come from, and the data_source that selects their reward."""

    split: str
    data_source: str
    file: str
    hub_name: str
    hub_split: str


SOURCES = (
    Source("train", "lighteval/MATH", "train", HUB_NAME, "train"),
    Source("test", "HuggingFaceH4/MATH-500", "math500", "HuggingFaceH4/MATH-500", "test"),
    Source("aime24", "aime24", "aime24", "HuggingFaceH4/aime_2024", "train"),
)


def main() -> None:
    layout = "folder with train*.json, math500.jsonl and aime24.jsonl"
    options = raw_data.argument_parser(__doc__, "math", HUB_NAME, layout).parse_args()
    folder = options.local_dataset_path
    for source in SOURCES:
        if folder and source.split != "train" and not raw_data.local_files(folder, [source.file]):
            print(f"{source.file}: not in {folder}; {source.split}.parquet is left out")
            continue
        name = options.hub_name if source.split == "train" else source.hub_name
        raw = (
            raw_data.from_folder(folder, [source.file], f"{name} on the hub")
            if folder
            else raw_data.from_hub(name, source.hub_split)
        )
        converted = [training_row(item, index, source) for index, item in enumerate(raw)]
        rows = [row for row in converted if row is not None]
        raw_data.save(
            rows, options.local_save_dir, source.split, f", {len(converted) - len(rows)} without an answer left out"
        )


def training_row(item: Row, index: int, source: Source) -> Row | None:
    """One row in the schema of RL data, None without an answer; AIME has the prompt and the reward of DAPO."""
    problem = raw_data.field(item, "problem", f"{source.split} row {index}")
    answer = find_answer(item)
    if answer is None:
        return None
    metadata = ("level", "subject", "type", "difficulty")
    extra_info = {"split": source.split, "index": index, **{name: item[name] for name in metadata if name in item}}
    prompt = dapo_math.with_instruction(problem) if source.data_source == "aime24" else f"{problem} {INSTRUCTION}"
    return raw_data.training_row(source.data_source, prompt, "math", answer, extra_info)


def find_answer(item: Row) -> str | None:
    """The answer, or the content of the last box of the solution; None if there is neither."""
    if item.get("answer"):
        return str(item["answer"])
    boxed = last_boxed_only_string(item.get("solution") or "")
    return None if boxed is None else remove_boxed(boxed)


if __name__ == "__main__":
    main()
