"""Table of the test results by engine; `python -m tests.engines.table FOLDER` combines the results of several runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

_SHOWN = {"passed": "yes", "failed": "NO", "skipped": "-"}


def table(results: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    """Return the table. `results`: (test, engine) → outcome and the reason for a skip."""
    engines = list(dict.fromkeys(engine for _, engine in results))
    tests = list(dict.fromkeys(test for test, _ in results))
    width = max(map(len, tests))
    lines = ["  ".join([" " * width, *engines])]
    for test in tests:
        outcomes = [results.get((test, engine), ("", ""))[0] for engine in engines]
        shown = [_SHOWN.get(outcome, "").center(len(engine)) for engine, outcome in zip(engines, outcomes, strict=True)]
        lines.append("  ".join([test.ljust(width), *shown]).rstrip())
    reasons = dict.fromkeys((engine, why) for (_, engine), (_, why) in results.items() if why)
    return "\n".join([*lines, *(f"- {engine}: {why}" for engine, why in reasons)])


if __name__ == "__main__":
    found = {}
    for file in sorted(Path(sys.argv[1]).glob("*.json"), key=lambda path: path.stat().st_mtime):
        found.update({(test, engine): (outcome, why) for test, engine, outcome, why in json.loads(file.read_text())})
    print(table(found) if found else "no engine was tested")  # noqa: T201
