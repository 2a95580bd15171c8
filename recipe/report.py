"""Compare the first and the last validation of a run: share of responses that used a tool, and of correct ones.

python -m recipe.report runs/search_r1/tiny/answers --mark '<information>' --called searched
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(responses: list[dict[str, Any]], mark: str) -> tuple[float, float]:
    """(share of responses that contain the mark, mean score)"""
    marked = sum(mark in response["output"] for response in responses)
    return marked / len(responses), sum(response["score"] for response in responses) / len(responses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="trainer.validation_data_dir of the run")
    parser.add_argument("--mark", required=True, help="text that occurs in every response that used the tool")
    parser.add_argument("--called", required=True, help="column title for such responses")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    if len(files) < 2:
        raise SystemExit(
            f"{options.folder}: {len(files)} validations, but two are needed. "
            "Set trainer.val_before_train and trainer.test_freq."
        )
    before, after = read(files[0]), read(files[-1])
    print(f"{'':24}{options.called:>10}{'correct':>14}   ({len(after)} questions)")
    for name, responses in ((f"before (step {files[0].stem})", before), (f"after (step {files[-1].stem})", after)):
        used, correct = summary(responses, options.mark)
        print(f"{name:24}{used:>10.1%}{correct:>14.1%}")
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: pair[0]["score"] - pair[1]["score"])
    for old, new in pairs[:2]:
        print(f"\n{new['input'].strip()[-300:]}\n  before: {old['output'].strip()}\n  after:  {new['output'].strip()}")


if __name__ == "__main__":
    main()
