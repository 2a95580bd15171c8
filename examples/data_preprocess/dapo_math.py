"""DAPO-Math-17k as training data: `train.parquet` (arXiv 2503.14476), each problem once.

    python examples/data_preprocess/dapo_math.py --local_save_dir ~/data/dapo_math \
        [--local_dataset_path ../shared/data/dapo_math_17k]

The file on the hub contains every problem about a hundred times: duplicates are dropped, and so are problems with
contradictory answers. For validation use `aime24.parquet` of `math_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import raw_data
from raw_data import Row

DATA_SOURCE = "math_dapo"
HUB_NAME = "BytedTsinghua-SIA/DAPO-Math-17k"
INSTRUCTION = 'Think step by step. Then write the answer on a last line of its own: "Answer:" and the answer.'


def main() -> None:
    layout = "a parquet or jsonl file with prompt and reward_model, or its folder"
    options = raw_data.argument_parser(__doc__, "dapo_math", HUB_NAME, layout).parse_args()
    raw = (
        raw_data.from_folder(options.local_dataset_path, [""], f"{HUB_NAME} on the hub")
        if options.local_dataset_path
        else raw_data.from_hub(options.hub_name, "train")
    )
    rows, contradictory = training_rows(raw)
    note = f", {contradictory} problems with contradictory answers left out"
    raw_data.save(rows, options.local_save_dir, "train", note)


def training_rows(raw: Iterable[Row]) -> tuple[list[Row], int]:
    """Rows in the schema of RL data, and the number of problems with more than one answer."""
    first: dict[str, int] = {}
    answers: dict[str, set[str]] = {}
    for index, item in enumerate(raw):
        location = f"train row {index}"
        problem = raw_data.field(item, "prompt", location)[-1]["content"].strip()
        first.setdefault(problem, index)
        answers.setdefault(problem, set()).add(str(raw_data.field(item, "reward_model", location)["ground_truth"]))
    rows = [
        raw_data.training_row(
            DATA_SOURCE, with_instruction(problem), "math", answers[problem].pop(), {"split": "train", "index": index}
        )
        for problem, index in first.items()
        if len(answers[problem]) == 1
    ]
    return rows, len(first) - len(rows)


def with_instruction(problem: str) -> str:
    """Add the answer format that the reward expects, unless the problem already states it."""
    return problem if "Answer:" in problem else f"{problem}\n\n{INSTRUCTION}"


if __name__ == "__main__":
    main()
