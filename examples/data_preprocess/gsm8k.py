"""GSM8K as training data: `train.parquet` and `test.parquet` from local jsonl files or from the hub.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k [--local_dataset_path ../shared/data/gsm8k]

The raw data is openai/grade-school-math (MIT): `train.jsonl` and `test.jsonl` with question and answer (`… #### N`).
"""

from __future__ import annotations

import raw_data
from raw_data import Row

from verl.utils.reward_score.gsm8k import extract_solution

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main() -> None:
    layout = "folder with train.jsonl and test.jsonl"
    options = raw_data.argument_parser(__doc__, "gsm8k", DATA_SOURCE, layout).parse_args()
    for split in ("train", "test"):
        raw = (
            raw_data.from_folder(options.local_dataset_path, [split], "openai/grade-school-math")
            if options.local_dataset_path
            else raw_data.from_hub(options.hub_name, split, "main")
        )
        raw_data.save(
            (training_row(item, index, split) for index, item in enumerate(raw)), options.local_save_dir, split
        )


def training_row(item: Row, index: int, split: str) -> Row:
    """One row in the schema of RL data."""
    question, solution = (raw_data.field(item, name, f"{split} row {index}") for name in ("question", "answer"))
    answer = extract_solution(solution)
    if answer is None:
        raise SystemExit(f"{split} row {index}: the answer does not end with '#### N'. Check the raw data.")
    extra_info = {"split": split, "index": index, "question": question, "answer": solution}
    return raw_data.training_row(DATA_SOURCE, f"{question} {INSTRUCTION}", "math", answer, extra_info)


if __name__ == "__main__":
    main()
