"""What training changed: how many questions were searched and how many answered right, before and after.

python -m recipe.search_r1.report runs/search_r1/tiny/answers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SEARCHED = "<information>"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(answers: list[dict[str, Any]]) -> tuple[float, float]:
    """(share of questions that were searched, share of right answers)"""
    searched = sum(SEARCHED in answer["output"] for answer in answers)
    return searched / len(answers), sum(answer["score"] for answer in answers) / len(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="trainer.validation_data_dir of the run")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    if len(files) < 2:
        raise SystemExit(f"{options.folder}: {len(files)} validations. Two are needed: one before, one after.")
    before, after = read(files[0]), read(files[-1])
    print(f"{'':24}{'searched':>10}{'exact match':>14}   ({len(after)} questions)")
    for name, answers in ((f"before (step {files[0].stem})", before), (f"after (step {files[-1].stem})", after)):
        searched, right = summary(answers)
        print(f"{name:24}{searched:>10.1%}{right:>14.1%}")
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: pair[0]["score"] - pair[1]["score"])
    for old, new in pairs[:2]:
        print(f"\n{new['input'].strip()[-300:]}\n  before: {old['output'].strip()}\n  after:  {new['output'].strip()}")


if __name__ == "__main__":
    main()
