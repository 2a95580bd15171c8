"""Code blocks of README.md and the documentation, and how each of them is tested.

`python -m tests.support.documents` counts them and prints why some are not executed.

A bash or python block of a page of the site is executed in the fast tier, one of another document is only composed.
A comment in front of the block changes this:

    <!-- executed: slow -->                       in the slow tier
    <!-- executed: with tiny a.b=1 -->            training commands get these overrides ("tiny": a tiny model on a CPU)
    <!-- executed: slow with tiny -->             both
    <!-- composed: needs a GPU -->                only the configuration and the options are checked
    <!-- not executed: needs a cluster -->        the same, and programs of other projects are allowed

A text block directly after an executed block is its expected output; `…` stands for any text, a line `…` for any lines.
With `<!-- output: example -->` in front of it, it is not compared.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXECUTED, SLOW, COMPOSED, NOT_EXECUTED = "executed", "executed, slow tier", "composed", "not executed"
SHELL = ("bash", "sh", "shell", "console")
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "recipe/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
# Folders of the site. Other documents belong to scripts that tests/e2e runs: their blocks are composed by default.
SITE = ("README.md", "docs/start/", "docs/guides/", "docs/concepts/", "docs/reference/", "docs/contributing/")
SITE_PAGES = ("docs/index.md", "docs/results.md")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.M | re.S)
_DIRECTIVE = re.compile(r"<!--\s*(executed|composed|not executed|output):\s*((?:(?!-->).)*?)\s*-->\s*$", re.S)
_FILE = re.compile(r"# ([\w/]+\.\w+)\b")


@dataclass(frozen=True)
class Block:
    """One fenced block. `output` is the expected output, None if there is none to compare."""

    document: str
    line: int
    language: str
    text: str
    mode: str
    reason: str = ""
    overrides: list[str] = field(default_factory=list)
    output: str | None = None

    @property
    def location(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def file(self) -> str | None:
        """Name of the file that the block shows: a first line `# name.py`."""
        match = _FILE.match(self.text)
        return match[1] if match else None


def is_site_page(document: str) -> bool:
    return document.startswith(SITE) or document in SITE_PAGES


def blocks_of(document: str) -> list[Block]:
    """The bash and python blocks of a document, in order."""
    return list(parse((ROOT / document).read_text(), document))


def parse(text: str, document: str) -> Iterator[Block]:
    fences = list(_FENCE.finditer(text))
    for index, fence in enumerate(fences):
        if fence["language"] in (*SHELL, "python"):
            mode, reason, overrides = _mode(text[: fence.start()], document)
            following = fences[index + 1] if index + 1 < len(fences) else None
            output = _output(text, fence, following, document)
            if output is not None and mode not in (EXECUTED, SLOW) and is_site_page(document):
                raise ValueError(f"{document}: a block that is not executed has an output; mark it as an example")
            code = textwrap.dedent(fence["text"])
            line = text.count("\n", 0, fence.start()) + 1
            yield Block(document, line, fence["language"], code, mode, reason, overrides, output)


def _mode(before: str, document: str) -> tuple[str, str, list[str]]:
    directive = _DIRECTIVE.search(before)
    if directive is None:
        return (
            (EXECUTED, "", []) if is_site_page(document) else (COMPOSED, "belongs to a script with a separate test", [])
        )
    kind, text = directive[1], " ".join(directive[2].split())
    if kind in (COMPOSED, NOT_EXECUTED):
        return kind, text, []
    words = text.split()
    slow = words[:1] == ["slow"]
    markers = words[1:] if slow else words
    if kind != "executed" or not words or (markers and markers[0] != "with"):
        raise ValueError(f"{document}: unknown directive {directive[0]!r}")
    return (SLOW if slow else EXECUTED), "", markers[1:]


def _output(text: str, fence: re.Match[str], following: re.Match[str] | None, document: str) -> str | None:
    """The text block after `fence` if nothing is between them; None if it is an example or there is none."""
    if following is None or following["language"] != "text":
        return None
    between = text[fence.end() : following.start()].strip()
    directive = _DIRECTIVE.search(between)
    if directive and (directive[1], directive[2]) != ("output", "example"):
        raise ValueError(f"{document}: unknown directive {directive[0]!r}")
    indent = len(following["indent"])
    return None if between else "".join(line[indent:] or "\n" for line in following["text"].splitlines(keepends=True))


def matches(expected: str, printed: str) -> bool:
    """Whether the output is the expected one; trailing spaces and empty lines at both ends do not count."""
    lines = []
    for line in expected.strip().splitlines():
        if line.strip() == "…":
            lines.append("(?:.*\n)*?")
        else:
            lines.append(".*".join(re.escape(part) for part in line.rstrip().split("…")) + "\n")
    text = "\n".join(line.rstrip() for line in printed.strip().splitlines()) + "\n"
    return re.fullmatch("".join(lines), text) is not None


def all_blocks() -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks_of(document)]


def report() -> str:
    """Number of blocks by kind of test, and the reasons why some are not executed."""
    blocks = all_blocks()
    modes = Counter(block.mode for block in blocks)
    lines = [f"{len(blocks)} code blocks"]
    lines += [f"  {modes[mode]:4} {mode}" for mode in (EXECUTED, SLOW, COMPOSED, NOT_EXECUTED)]
    lines.append(f"  {sum(block.output is not None for block in blocks):4} outputs compared")
    lines += [f"  {block.mode}: {block.location}: {block.reason}" for block in blocks if _is_exception(block)]
    return "\n".join(lines)


def _is_exception(block: Block) -> bool:
    return block.mode == NOT_EXECUTED or (block.mode == COMPOSED and is_site_page(block.document))


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
