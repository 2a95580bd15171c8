"""The tiny task: random facts that only the corpus contains, questions about them, and a model that seldom searches.

    python -m recipe.search_r1.task --folder runs/search_r1/task

Facts are random ("The colour of north tavor is red."), and those of the validation set are in no other file: without a
search the model can only guess one of twelve values. The demonstrations of the warm start use other facts. They search
correctly, but most of the time they guess; training has to learn that searching pays off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.tiny import save_random_model, word_tokenizer, write_rows
from verl.agent.search_loop import FAILED, INVALID
from verl.search.client import NO_RESULTS, format_documents
from verl.search.corpus import Document
from verl.search.retriever import Hit


def split_words(text: str) -> list[str]:
    return text.split()


TAGS = ("<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
PLACES = split_words(
    "north south east west upper lower old new great little high low far near inner outer first second third last "
    "grand royal silent hidden"
)
NAMES = split_words(
    "tavor belan corin dural eskar falan goral hemar ivorn jelan kasim lorin morav nelor ostin parem quilan rovan "
    "selim torun ulmar vesin wolan yarin"
)
VALUES = {
    "colour": split_words("red blue green yellow black white brown grey pink purple orange golden"),
    "animal": split_words("wolf bear eagle horse lion tiger fox owl swan deer hare otter"),
    "metal": split_words("iron copper silver tin lead zinc nickel steel bronze brass cobalt chrome"),
    "fruit": split_words("apple pear plum cherry grape lemon melon peach fig date lime quince"),
}
SEARCHES = 0.25  # share of demonstrations that search
ROWS = {"sft": 12_000, "train": 1_536, "val": 256}


@dataclass(frozen=True)
class Fact:
    """A fact of the corpus; `value` is the answer to its question."""

    place: str
    name: str
    kind: str
    value: str

    @property
    def document(self) -> Document:
        title = f"{self.place} {self.name}"
        return Document(f"{title}/{self.kind}", f'"{title}"\nThe {self.kind} of {title} is {self.value}.')

    @property
    def question(self) -> str:
        return f"What is the {self.kind} of {self.place} {self.name}?"


def facts(rng: random.Random) -> list[Fact]:
    """One fact for every combination of place, name and kind, in random order."""
    kinds = [(place, name, kind) for place in PLACES for name in NAMES for kind in VALUES]
    rng.shuffle(kinds)
    return [Fact(place, name, kind, rng.choice(VALUES[kind])) for place, name, kind in kinds]


def demonstration(fact: Fact, other: Fact, rng: random.Random) -> dict[str, Any]:
    """A demonstration that searches or guesses; `other` is an irrelevant search result."""
    turns, value = [], rng.choice(VALUES[fact.kind])
    if rng.random() < SEARCHES:
        value = fact.value
        documents = format_documents([Hit(hit.document, 0.0) for hit in (fact, other)]).rstrip()
        query = f"<search> {fact.kind} of {fact.place} {fact.name} </search>"
        turns = [{"text": query, "by_model": True}, {"text": documents, "by_model": False}]
    turns.append({"text": f"<answer> {value} </answer>", "by_model": True})
    return {"prompt": [{"role": "user", "content": fact.question}], "turns": turns}


def question_row(fact: Fact, index: int, split: str) -> dict[str, Any]:
    """A training question; `data_source` selects the reward, exact match."""
    return {
        "data_source": "searchR1_facts",
        "prompt": [{"role": "user", "content": fact.question}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": {"target": [fact.value]}},
        "extra_info": {"split": split, "index": index},
    }


def make_task(folder: Path, seed: int = 1, rows: dict[str, int] | None = None) -> None:
    """Write `corpus.jsonl`, `sft.parquet`, `train.parquet`, `val.parquet` and `model/`."""
    rows, rng = rows or ROWS, random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = facts(rng)
    lines = (json.dumps(fact.document._asdict()) for fact in sorted(corpus, key=lambda fact: fact.document.id))
    (folder / "corpus.jsonl").write_text("".join(f"{line}\n" for line in lines))
    first = 0
    for split in ("train", "val"):
        chosen = corpus[first : first + rows[split]]
        first += len(chosen)
        write_rows(folder / f"{split}.parquet", [question_row(fact, i, split) for i, fact in enumerate(chosen)])
    sft_facts: list[Fact] = []
    while len(sft_facts) <= rows["sft"]:  # the same names with other values
        sft_facts += facts(rng)
    sft_rows = [demonstration(*pair, rng) for pair in itertools.pairwise(sft_facts[: rows["sft"] + 1])]
    write_rows(folder / "sft.parquet", sft_rows)
    save_random_model(folder / "model", word_tokenizer(vocabulary(), TAGS), seed, positions=160)


def vocabulary() -> list[str]:
    """All words and signs of the conversations."""
    texts = [INVALID, FAILED, NO_RESULTS, "Doc 1(Title: The) of is. What is the of?"]
    words = [word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)]
    return [
        *words,
        *map(str, range(10)),
        *PLACES,
        *NAMES,
        *VALUES,
        *(value for values in VALUES.values() for value in values),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/search_r1/task"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_task(options.folder, options.seed)
    print(f"created without downloads: {options.folder}")


if __name__ == "__main__":
    main()
