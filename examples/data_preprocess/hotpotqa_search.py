"""HotpotQA (arXiv 1809.09600) for agents that search: `train.parquet` and `test.parquet`.

    python examples/data_preprocess/hotpotqa_search.py --local_save_dir ~/data/hotpotqa_search \
        [--local_dataset_path ../shared/data/hotpot_search]

A local folder contains `train*.jsonl` and `dev*.jsonl` (or `test*`), or one `questions.jsonl` whose every tenth row is
used for the test; rows are {id, question, golden_answers}. The corpus of the retriever (`corpus.jsonl`) is not
converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import raw_data
from raw_data import Row

DATA_SOURCE = "hotpotqa"
HUB_NAME = "RUC-NLPIR/FlashRAG_datasets"
HUB_PART = "hotpotqa"
SPLITS = {
    "train": ("train", ("train",)),
    "test": ("dev", ("dev", "test")),
}  # split: name on the hub, prefixes of file names
TEST_EVERY = 10
INSTRUCTION = (
    "Answer the question below. Think inside <think> and </think> whenever you have learned something new. If you miss"
    " a fact, ask for it with <search> your query </search>: what is found comes back between <information> and"
    " </information>. You may search as often as you need. When you know the answer, write it between <answer> and"
    " </answer>, as short as it can be, for example <answer> Beijing </answer>.\n\nQuestion: "
)


def main() -> None:
    layout = "folder with questions.jsonl, or train*.jsonl and dev*.jsonl"
    options = raw_data.argument_parser(__doc__, "hotpotqa_search", HUB_NAME, layout).parse_args()
    for split, (hub_split, names) in SPLITS.items():
        folder = options.local_dataset_path
        if folder and not raw_data.local_files(folder, names):
            questions = raw_data.from_folder(folder, ["questions"], f"{HUB_NAME} ({HUB_PART}) on the hub")
            raw: Iterable[Row] = (
                item for index, item in enumerate(questions) if (index % TEST_EVERY == 0) == (split == "test")
            )
        elif folder:
            raw = raw_data.from_folder(folder, names, HUB_NAME)
        else:
            raw = raw_data.from_hub(options.hub_name, hub_split, HUB_PART)
        raw_data.save(training_rows(raw, split), options.local_save_dir, split)


def training_rows(raw: Iterable[Row], split: str) -> Iterator[Row]:
    """Rows in the schema of RL data; any of the golden answers is accepted."""
    for index, item in enumerate(raw):
        location = f"{split} row {index}"
        question = raw_data.field(item, "question", location).strip()
        truth = {"target": [str(answer) for answer in raw_data.field(item, "golden_answers", location)]}
        extra_info = {"split": split, "index": index, "id": str(item.get("id", index)), "question": question}
        yield raw_data.training_row(DATA_SOURCE, INSTRUCTION + question, "search", truth, extra_info)


if __name__ == "__main__":
    main()
