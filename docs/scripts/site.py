"""MkDocs hooks: version in the title, links to repository files, every page as Markdown, `llms.txt`.

Used by mkdocs.yml. Links that leave docs/ work on a code host as they are; in the site they lead to a copy of the file
under `source/`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)\s#]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)
linked_files: set[Path] = set()


def on_config(config: Any) -> Any:
    """Show the version of the package beside the name of the site."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "verl/version.py").read_text())
    assert version is not None
    config.site_name = f"verl {version[1]}"
    linked_files.clear()
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside docs/ at their copies under source/."""
    from mkdocs.exceptions import PluginError  # tests import this file where MkDocs is not installed

    if "```mermaid" in markdown:
        raise PluginError(f"{page.file.src_uri}: Mermaid is loaded from a CDN; add an SVG under docs/figures instead")
    folder = (DOCS / page.file.src_uri).parent
    up = "../" * page.file.src_uri.count("/")

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match["target"]))
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.is_file():
            raise PluginError(f"{page.file.src_uri}: {match['target']} is not a file of the repository")
        linked_files.add(target)
        return f'<a href="{up}source/{target.relative_to(ROOT).as_posix()}">{match["text"]}</a>'

    parts = []
    position = 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[position : fence.start()]), fence[0]]
        position = fence.end()
    return "".join([*parts, LINK.sub(replace, markdown[position:])])


def on_post_build(config: Any) -> None:
    """Copy the linked files and the Markdown of every page; write llms.txt."""
    site = Path(config.site_dir)
    for path in sorted(linked_files):
        copy = site / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for page in pages(config.nav):
        shutil.copyfile(DOCS / page, site / page)
    (site / "llms.txt").write_text(llms_text(config), encoding="utf-8")


def pages(nav: Any) -> list[str]:
    """The files of a navigation tree, in order."""
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [page for child in children for page in pages(child)]


def llms_text(config: Any) -> str:
    """An index of the site for language models (llmstxt.org): sections, pages and their first sentences."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}. Every page is Markdown.", ""]
    for entry in config.nav:
        ((title, content),) = entry.items()
        section = [{title: content}] if isinstance(content, str) else content
        lines += [] if isinstance(content, str) else ["", f"## {title}", ""]
        for item in section:
            ((name, page),) = item.items()
            lines.append(f"- [{name}]({page}): {summary(DOCS / page)}")
    return "\n".join(lines) + "\n"


def summary(path: Path) -> str:
    """The first sentence below the title of a page."""
    text = re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    body = re.split(r"^# .*$", text, maxsplit=1, flags=re.MULTILINE)[-1].strip()
    paragraph = " ".join(body.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]
