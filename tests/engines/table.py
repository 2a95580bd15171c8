"""What passed on which engine, as a table; `python -m tests.engines.table FOLDER` joins those of several runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

_SHOWN = {"passed": "yes", "failed": "NO", "skipped": "-"}


def table(results: Mapping[tuple[str, str], str]) -> str:
    """`results`: (test, engine) → outcome."""
    engines = list(dict.fromkeys(engine for _, engine in results))
    tests = list(dict.fromkeys(test for test, _ in results))
    width = max(map(len, tests))
    lines = ["  ".join([" " * width, *engines])]
    for test in tests:
        shown = [_SHOWN.get(results.get((test, engine), ""), "").center(len(engine)) for engine in engines]
        lines.append("  ".join([test.ljust(width), *shown]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    found = {}
    for file in sorted(Path(sys.argv[1]).glob("*.json"), key=lambda path: path.stat().st_mtime):
        found.update({(test, engine): outcome for test, engine, outcome in json.loads(file.read_text())})
    print(table(found) if found else "no engine was tested")  # noqa: T201
