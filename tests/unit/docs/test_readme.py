"""README.md and the pages of the site: length, links, navigation; figures; the source tree of the architecture page."""

from __future__ import annotations

import json
import re
import xml.dom.minidom

import pytest
import yaml

from tests.support.commands import ROOT
from tests.support.doc_scripts import load_script
from tests.support.documents import DOCUMENTS, is_site_page

README = (ROOT / "README.md").read_text()
PAGES = [document for document in DOCUMENTS if is_site_page(document)]
GENERATED = {f"docs/reference/{name}.md" for name in ("config", "columns", "python_api", "recording")}


def test_the_readme_has_at_most_100_lines_and_starts_with_the_command():
    lines = README.splitlines()
    assert len(lines) <= 100
    assert "make train" in "\n".join(lines[:12])


@pytest.mark.parametrize("page", sorted(set(PAGES) - GENERATED))
def test_sentences_are_wrapped_at_100_characters(page):
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    # Tables, comments and code that cannot be broken may be longer.
    breakable = re.sub(r"`[^`\n]+`|\]\([^)]*\)", "", text)
    assert [line for line in breakable.splitlines() if len(line) > 100 and not line.startswith(("|", "<!--"))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
    """`make docs` checks those of the site once more; other documents link to it, too."""
    for target in links(document):
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text()), target


def links(document: str) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text) if not re.match(r"\w+:", target)]


def anchors(text: str) -> set[str]:
    """The identifiers of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_navigation_lists_every_page_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [f"docs/{page}" for page in load_script("site.py").pages(config["nav"])]
    assert sorted(listed) == sorted(set(PAGES) - {"README.md"})


def test_the_files_along_the_path_of_a_prompt_exist():
    table = (ROOT / "docs/concepts/life_of_a_prompt.md").read_text().partition("\n## ")[0]
    paths = re.findall(r"`([\w/]+(?:/|\.py))`", table)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / "verl" / path).exists() and not (ROOT / path).exists()] == []


def test_the_source_tree_is_the_one_of_the_repository():
    page = (ROOT / "docs/contributing/architecture.md").read_text()
    section = page.partition("## Source tree")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {f"verl/{folder.parent.name}/" for folder in (ROOT / "verl").glob("*/__init__.py")}
    listed = {"/".join(path.split("/")[:2]) + "/" for path in paths if path.startswith("verl/")}
    assert packages <= listed, packages - listed


def test_the_python_api_page_is_what_the_docstrings_say():
    page = (ROOT / "docs/reference/python_api.md").read_text()
    assert page == load_script("python_api.py").render(), "run: make docs-pages"


def test_a_curve_is_drawn_from_the_metrics_of_a_run(tmp_path):
    figures = load_script("figures.py")
    rows = [{"step": 0, "data": {"val/a/accuracy": 0.0}}, {"step": 1, "data": {}}]
    rows.append({"step": 2, "data": {"val/a/accuracy": 1.0}})
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = figures.read_curve(file, "accuracy")
    assert curve == [(0, 0.0), (2, 1.0)]
    svg = xml.dom.minidom.parseString(figures.draw({"A & B": curve}, "title"))
    (line,) = svg.getElementsByTagName("polyline")
    bottom, top = figures.HEIGHT - figures.BOTTOM, figures.TOP
    assert line.getAttribute("points") == f"{figures.LEFT}.0,{bottom}.0 {figures.WIDTH - figures.RIGHT}.0,{top}.0"
    with pytest.raises(SystemExit, match=r"metrics\.jsonl: .*\bloss\b"):
        figures.read_curve(file, "loss")


def test_the_figure_of_batch_sizes_is_what_its_script_draws():
    assert (ROOT / "docs/figures/batch_sizes.svg").read_text() == load_script("batch_sizes.py").draw()
