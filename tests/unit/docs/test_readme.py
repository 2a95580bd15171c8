"""README.md is one short page that links every page of the docs; docs/architecture.md lists the real source tree."""

from __future__ import annotations

import re

from tests.support.commands import ROOT

README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_every_page_is_in_its_table():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
    linked = set(re.findall(r"\]\((docs/[a-z_0-9]+\.md)\)", README))
    assert linked == {str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")}


def test_the_two_commands_are_in_the_first_screen():
    first = "\n".join(README.splitlines()[:30])
    assert "make train" in first
    assert "make test" in first


def test_the_source_tree_is_the_one_of_the_repository():
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## Source tree")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {f"verl/{folder.parent.name}/" for folder in (ROOT / "verl").glob("*/__init__.py")}
    listed = {"/".join(path.split("/")[:2]) + "/" for path in paths if path.startswith("verl/")}
    assert packages <= listed, packages - listed
