"""Two-step arithmetic problems as train and test parquet, reproducible by seed.

    python examples/smollm2/make_data.py --local_save_dir ~/data/two_step

A prompt contains two solved problems before the question, so that a small model knows the format. `reward.py` scores
the last number of a response.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "two_step"


@dataclass(frozen=True)
class Problem:
    """`first` ± `second` ± `third`; no intermediate result is negative."""

    first: int
    second: int
    third: int
    signs: str

    @property
    def question(self) -> str:
        return f"What is {self.first} {self.signs[0]} {self.second} {self.signs[1]} {self.third}?"

    @property
    def steps(self) -> tuple[int, int]:
        """The result of each step."""
        intermediate = self.first + (self.second if self.signs[0] == "+" else -self.second)
        return intermediate, intermediate + (self.third if self.signs[1] == "+" else -self.third)

    @property
    def solution(self) -> str:
        intermediate, result = self.steps
        first = f"{self.first} {self.signs[0]} {self.second} = {intermediate}."
        return f"{first} {intermediate} {self.signs[1]} {self.third} = {result}."


SHOWN = (Problem(12, 5, 9, "+-"), Problem(15, 7, 4, "-+"))


def problems(seed: int, largest: int) -> Iterator[Problem]:
    """Distinct problems with numbers from 2 to `largest`, without the solved examples."""
    rng, seen = random.Random(seed), set(SHOWN)
    while True:
        first, second, third = (rng.randint(2, largest) for _ in range(3))
        problem = Problem(first, second, third, rng.choice("+-") + rng.choice("+-"))
        if problem not in seen and min(problem.steps) >= 0:
            seen.add(problem)
            yield problem


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """The prompt and its answer."""
    messages = [text for shown in SHOWN for text in (shown.question, shown.solution)] + [problem.question]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(messages)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.steps[1])},
        "extra_info": {"split": split, "index": index},
    }


def make(folder: Path, train: int, test: int, largest: int, seed: int) -> None:
    """Write `train.parquet` and `test.parquet`; they have no problem in common."""
    # Three of eight draws have a negative intermediate result or result. If most of the other problems are already in
    # use, drawing takes too long.
    if train + test > 4 * (largest - 1) ** 3 // 2:
        raise SystemExit(f"--largest {largest}: too few problems for {train + test} rows. Raise it.")
    folder.mkdir(parents=True, exist_ok=True)
    stream = problems(seed, largest)
    for split, rows in (("train", train), ("test", test)):
        table = [row(next(stream), split, index) for index in range(rows)]
        pq.write_table(pa.Table.from_pylist(table), folder / f"{split}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_save_dir", default="~/data/two_step", help="folder to write")
    parser.add_argument("--train", type=int, default=4000, help="problems to train on")
    parser.add_argument("--test", type=int, default=512, help="problems to validate on")
    parser.add_argument("--largest", type=int, default=15, help="numbers go from 2 to this")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(options.local_save_dir).expanduser()
    make(folder, options.train, options.test, options.largest, options.seed)
    print(f"{folder}: {options.train} problems to train on, {options.test} to validate on")


if __name__ == "__main__":
    main()
