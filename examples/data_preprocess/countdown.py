"""Generate Countdown puzzles: disjoint `train.parquet` and `test.parquet`, each puzzle with a solution.

    python examples/data_preprocess/countdown.py --local_save_dir ~/data/countdown [--train_size 10000] [--seed 1]

Given numbers and a target, find an equation that uses each number once (`<answer> (7 - 2) * 6 </answer>`). The same
arguments always generate the same puzzles.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import raw_data
from raw_data import Row

DATA_SOURCE = "countdown"
_MAX_ATTEMPTS = 1000  # consecutive attempts without a new puzzle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    raw_data.add_save_dir(parser, "countdown")
    parser.add_argument("--train_size", type=int, default=10_000)
    parser.add_argument("--test_size", type=int, default=512)
    parser.add_argument("--numbers", type=int, nargs="+", default=[3, 4], help="allowed counts of numbers in a puzzle")
    parser.add_argument("--largest", type=int, default=99, help="largest number in a puzzle")
    parser.add_argument("--largest_target", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    puzzles = distinct_puzzles(options)
    for split, size in (("test", options.test_size), ("train", options.train_size)):
        rows = [training_row(*puzzle, index, split) for index, puzzle in zip(range(size), puzzles, strict=False)]
        if len(rows) < size:
            raise SystemExit(f"--{split}_size: only {len(rows)} new puzzles found. Raise --largest or --numbers.")
        raw_data.save(rows, options.local_save_dir, split)


def distinct_puzzles(options: argparse.Namespace) -> Iterator[tuple[list[int], int, str]]:
    """Solvable puzzles: numbers, target, solution."""
    rng, seen, failed = random.Random(options.seed), set(), 0
    while failed < _MAX_ATTEMPTS:
        numbers = [rng.randint(1, options.largest) for _ in range(rng.choice(options.numbers))]
        target, solution = random_equation(numbers, rng)
        puzzle = (tuple(sorted(numbers)), target)
        failed += 1
        if 1 <= target <= options.largest_target and target not in numbers and puzzle not in seen:
            seen.add(puzzle)
            failed = 0
            yield numbers, target, solution


def random_equation(numbers: list[int], rng: random.Random) -> tuple[int, str]:
    """Combine random terms by operators that keep positive integers until one is left; (value, equation)."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        (a, left), (b, right) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        results = [(a + b, "+"), (a * b, "*")]
        results += [(a - b, "-")] if a > b else []
        results += [(a // b, "/")] if b > 1 and a % b == 0 else []
        value, operator = rng.choice(results)
        terms.append((value, f"({left} {operator} {right})"))
    value, equation = terms[0]
    return value, equation.removeprefix("(").removesuffix(")")


def training_row(numbers: list[int], target: int, solution: str, index: int, split: str) -> Row:
    """One row in the schema of RL data."""
    prompt = (
        f"Use the numbers {', '.join(map(str, numbers))}, each exactly once, with + - * / and brackets to make"
        f" {target}. Think first, inside <think> and </think>. Then write the equation between <answer> and </answer>,"
        " for example <answer> (1 + 2) / 3 </answer>."
    )
    truth = {"target": target, "numbers": numbers}
    extra_info = {"split": split, "index": index, "solution": solution}
    return raw_data.training_row(DATA_SOURCE, prompt, "math", truth, extra_info)


if __name__ == "__main__":
    main()
