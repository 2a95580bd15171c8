"""`verl view --export`: one file without network access, within its size, that states what is left out."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import HOSTILE, UIDS, close, open_writer, write_run
from verl.viewer.export import EXPORT, IMPORT, MODULES, write_export
from verl.viewer.run import ViewedRun
from verl.viewer.server import STATIC


def contents(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="exported">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    exported = json.loads(match[1])
    data = {key: json.loads(gzip.decompress(base64.b64decode(text))) for key, text in exported["data"].items()}
    sizes = {key: len(key) + len(text) for key, text in exported["data"].items()}
    return {"data": data, "omissions": exported["omissions"], "sizes": sizes}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ViewedRun:
    return ViewedRun(write_run(tmp_path_factory.mktemp("run"), steps=12, experiment=f"name {HOSTILE}"))


def test_a_small_run_is_complete_except_for_some_steps(run, tmp_path):
    size = write_export([run], tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert size == (tmp_path / "run.html").stat().st_size
    exported = contents(page)
    assert exported["data"]["metrics?run=0"] == run.metrics()
    assert exported["data"][f"answer?run=0&sample=1&step=12&uid={UIDS[2]}"] == run.response(12, UIDS[2], 1)
    assert exported["data"][f"validation_answers?run=0&uid={UIDS[1]}"] == run.validation_responses(UIDS[1])
    steps = {int(key.partition("step=")[2]) for key in exported["data"] if key.startswith("groups?")}
    assert {1, 12} <= steps
    assert len(steps) == 8
    assert "groups of 8 of 12 steps: 1, " in exported["omissions"]


def test_a_budget_leaves_out_responses_and_says_so(run, tmp_path):
    write_export([run], tmp_path / "all.html")
    small = (tmp_path / "all.html").stat().st_size - 8000
    assert write_export([run], tmp_path / "small.html", small) <= small
    assert "only some responses of" in contents((tmp_path / "small.html").read_text())["omissions"]
    with pytest.raises(ValueError, match=r"--export: .* 0\.07 MB"):
        write_export([run], tmp_path / "none.html", 70_000)
    assert not (tmp_path / "none.html").exists()


def test_missing_timelines_are_listed_as_left_out(run, tmp_path):
    size = write_export([run], tmp_path / "all.html")
    exported = contents((tmp_path / "all.html").read_text())
    assert "timeline" not in exported["omissions"]
    optional = {key: size for key, size in exported["sizes"].items() if "step=" in key or "uid=" in key}
    timelines = {key: size for key, size in exported["sizes"].items() if key.startswith("timeline?")}
    reserved = 4096
    budget = size + reserved - sum(optional.values()) - sum(timelines.values()) // 2
    write_export([run], tmp_path / "small.html", budget)
    exported = contents((tmp_path / "small.html").read_text())
    steps = sorted(int(re.search(r"last=(\d+)", key)[1]) for key in exported["data"] if key in timelines)
    assert 0 < len(steps) < len(timelines)
    assert steps == list(range(steps[0], 13))
    assert f"timeline of steps {steps[0]} to 12;" in exported["omissions"]


def test_the_timeline_of_step_0_is_listed_as_left_out(tmp_path):
    writer = open_writer(tmp_path)
    writer.line("metrics", {"step": 20, "time": 1.0, "data": {}})
    close(writer)
    write_export([ViewedRun(tmp_path)], tmp_path / "run.html")
    assert "timeline of steps 1 to 20." in contents((tmp_path / "run.html").read_text())["omissions"]


def test_only_the_pages_own_script_and_style_are_allowed(run, tmp_path):
    write_export([run], tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    scripts = re.findall(r"<script( [^>]*)?>(.*?)</script>", page, re.DOTALL)
    assert [kind.strip() for kind, _ in scripts] == ['type="application/json" id="exported"', 'type="module"']
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "unsafe" not in page.partition("</head>")[0]
    assert not re.search(r"(src|href)=\"(?!data:|#)", page.partition("</head>")[0])


def test_modules_can_be_concatenated():
    """Imports are on one line, every module comes after those it imports, and top-level names are unique."""
    names: list[str] = []
    for number, module in enumerate(MODULES):
        text = (STATIC / module).read_text()
        for imported in re.findall(r'from "\./(.+?)";', text):
            assert imported in MODULES[:number], f"{module} imports {imported}"
        text = EXPORT.sub("", IMPORT.sub("", text))
        assert not re.search(r"^(import|export)\b", text, re.MULTILINE), module
        names += re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", text, re.MULTILINE)
        for first in re.findall(r"^(?:const|let) (\w+ = [^;]*?, \w+ = .*);", text, re.MULTILINE):
            names += re.findall(r", (\w+) = ", first)
    assert {path.name for path in STATIC.glob("*.js")} == set(MODULES)
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


def test_the_export_replaces_the_file_only_when_it_is_complete(run, tmp_path):
    path = tmp_path / "run.html"
    path.write_text("before")
    with pytest.raises(ValueError, match="--export"):
        write_export([run], path, 70_000)
    assert Path(path).read_text() == "before"
