"""`python -m verl.sandbox`: print what this host can isolate, and which languages it can run."""

from __future__ import annotations

import argparse
import sys

from verl.sandbox.sandbox import available
from verl.sandbox.types import LANGUAGES, REQUIRE


def main() -> None:
    argparse.ArgumentParser(prog="python -m verl.sandbox", description=__doc__).parse_args()
    sys.stdout.write(describe_host())


def describe_host() -> str:
    """The isolation level of this host, what it lacks, the levels it meets, and its languages; one per line."""
    isolation = available()
    lines = [f"{isolation}", *(f"missing: {feature}" for feature in isolation.missing)]
    for level in REQUIRE:
        met = REQUIRE.index(level) <= REQUIRE.index(isolation.level)
        lines.append(f"sandbox.require={level}: {'yes' if met else 'no'}")
    languages: dict[str, str] = {}  # by file name: several names stand for one language
    for name, language in LANGUAGES.items():
        languages.setdefault(language.file, f"{name}: {'no ' + tool if (tool := language.missing_tool()) else 'yes'}")
    return "\n".join([*lines, *languages.values(), ""])


if __name__ == "__main__":
    main()
