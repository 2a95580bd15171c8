"""HotpotQA for a small model: training and validation questions, and demonstrations with the real retriever.

    python -m recipe.search_r1.hotpot --folder runs/search_r1/smollm2/data [--source ../shared/data/hotpot_search]

The source contains `questions.jsonl` ({id, question, golden_answers}) and `corpus.jsonl` ({id, contents}). Of every ten
questions three are used in demonstrations, four for training and three for validation. A demonstration either searches
(only if the results contain the answer) or guesses the answer of another question.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "data_preprocess"))
from hotpotqa_search import training_rows

from recipe.tiny import write_rows
from verl.search.client import format_documents
from verl.search.retriever import Retriever, open_retriever
from verl.utils.reward_score.qa_em import normalize_answer, subem_check

SPLITS = {"sft": range(0, 3), "train": range(3, 7), "val": range(7, 10)}
SEARCHES = 0.4  # share of demonstrations that search
VARIANTS = 6  # demonstrations of one question
TOPK = 3


def demonstrations(rows: Sequence[dict[str, Any]], retriever: Retriever, rng: random.Random) -> list[dict[str, Any]]:
    """Several demonstrations of each question, in random order."""
    guesses = [row["reward_model"]["ground_truth"]["target"][0] for row in rows]
    result = []
    for row in rows:
        question, golden = row["extra_info"]["question"], row["reward_model"]["ground_truth"]["target"]
        (hits,) = retriever.retrieve([question], TOPK)
        documents = format_documents(hits).rstrip()
        has_answer = subem_check(documents, golden) or normalize_answer(golden[0]) in ("yes", "no")
        for variant in range(VARIANTS):
            if variant >= SEARCHES * VARIANTS:
                turns = [(f"<think> I may know this. </think>\n<answer> {rng.choice(guesses)} </answer>", True)]
            elif has_answer:
                query = f"<think> I should look this up. </think>\n<search> {question} </search>"
                turns = [(query, True), (documents, False), (f"<answer> {golden[0]} </answer>", True)]
            else:
                continue
            result.append({"prompt": row["prompt"], "turns": [{"text": text, "by_model": by} for text, by in turns]})
    rng.shuffle(result)
    return result


def make(source: Path, folder: Path, seed: int) -> None:
    """Write `sft.parquet`, `train.parquet` and `val.parquet`."""
    missing = [name for name in ("questions.jsonl", "corpus.jsonl") if not (source / name).is_file()]
    if missing:
        raise SystemExit(f"--source: {source} has no {', '.join(missing)}. HotpotQA: https://hotpotqa.github.io")
    raw = [json.loads(line) for line in (source / "questions.jsonl").read_text().splitlines()]
    retriever = open_retriever(str(source / "corpus.jsonl"))
    for split, digits in SPLITS.items():
        rows = list(training_rows((item for number, item in enumerate(raw) if number % 10 in digits), split))
        if split == "sft":
            rows = demonstrations(rows, retriever, random.Random(seed))
        write_rows(folder / f"{split}.parquet", rows)
        print(f"{folder / split}.parquet: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/search_r1/smollm2/data"))
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[3] / "shared" / "data" / "hotpot_search")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make(options.source.expanduser(), options.folder, options.seed)


if __name__ == "__main__":
    main()
