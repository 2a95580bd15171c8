"""UltraFeedback (arXiv 2310.01377) as preference pairs: `train.parquet` and `test.parquet`.

    python examples/data_preprocess/ultrafeedback.py --local_save_dir ~/data/ultrafeedback \
        [--local_dataset_path ../shared/data/ultrafeedback]

A row is a prompt of RL data scored by a reward model, with the columns `chosen` and `rejected`, the two answers as text
for the training of a reward model (`verl.trainer.main_rm`), and `score_gap`, the difference of their ratings on a scale
of ten (null if the raw row has none). To use it as weight: data.weight_key=score_gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import hh_rlhf
import raw_data
from raw_data import Row

DATA_SOURCE = "ultrafeedback"
HUB_NAME = "HuggingFaceH4/ultrafeedback_binarized"
HUB_SPLITS = {"train": "train_prefs", "test": "test_prefs"}


def main() -> None:
    options = raw_data.argument_parser(__doc__, "ultrafeedback", HUB_NAME, hh_rlhf.LAYOUT).parse_args()
    folder = options.local_dataset_path
    for split, names in hh_rlhf.SPLITS.items():
        raw = (
            raw_data.from_folder(folder, names, f"{HUB_NAME} on the hub")
            if folder
            else raw_data.from_hub(options.hub_name, HUB_SPLITS[split])
        )
        raw_data.save(pairs(raw, split), options.local_save_dir, split)


def pairs(raw: Iterable[Row], split: str) -> Iterator[Row]:
    """Prompts with both answers; pairs of equal answers are left out."""
    for index, item in enumerate(raw):
        row = hh_rlhf.training_row(item, index, split, DATA_SOURCE)
        if row is not None:
            chosen, rejected = row["reward_model"]["ground_truth"], row["extra_info"]["rejected"]
            if chosen != rejected:
                yield {**row, "chosen": chosen, "rejected": rejected, "score_gap": score_gap(item)}


def score_gap(item: Row) -> float | None:
    """Difference of the ratings, which are in the row itself (hub) or in its `metadata` (cleaned versions)."""
    ratings = item if "score_chosen" in item else item.get("metadata") or {}
    if ratings.get("score_chosen") is None or ratings.get("score_rejected") is None:
        return None
    return float(ratings["score_chosen"]) - float(ratings["score_rejected"])


if __name__ == "__main__":
    main()
