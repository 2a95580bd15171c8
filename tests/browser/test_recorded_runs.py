"""All pages on recordings of real runs: sync with validation, asynchronous, agents with tools, SFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recorded_runs import RUNS, record_run
from verl import recording

pytestmark = pytest.mark.browser
PAGES = ("overview", "timeline", "groups", "answer", "validation", "health")


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory) -> tuple[str, Path]:
    return request.param, record_run(request.param, tmp_path_factory.mktemp(request.param))


def test_every_page_shows_the_run(browser, serve, run):
    kind, folder = run
    recorded = recording.read(folder)
    with serve(folder) as url:
        for page in PAGES:
            browser.open(f"{url}#{page}")
            assert "not found" not in browser.text.lower()
            assert browser.errors() == [], page
            browser.screenshot(f"{kind}-{page}")
            if page == "overview":
                assert browser.evaluate("document.querySelectorAll('figure').length") > 2
            if page == "timeline":
                tracks = set(recorded.phases.table()["track"].to_pylist())
                label = browser.evaluate("document.querySelector('.page canvas').ariaLabel")
                assert "controller idle" in label
                assert any(track in label for track in tracks - {"controller"})


def test_answers_are_those_of_the_run(browser, serve, run):
    kind, folder = run
    recorded = recording.read(folder)
    if kind == "sft":
        assert recorded.groups.steps == []
        return
    step = recorded.trajectories.steps[-1]
    row = recorded.trajectories.table(step=step).to_pylist()[0]
    with serve(folder) as url:
        browser.open(f"{url}#groups?step={step}")
        assert f"{len(recorded.groups.table(step=step))} groups" in browser.text
        browser.open(f"{url}#answer?step={step}&uid={row['uid']}&sample={row['sample_index']}")
        browser.wait("document.querySelectorAll('.token[data-index]').length > 0")
        marked = browser.evaluate("document.querySelectorAll('.token.trained[data-index]').length")
        assert marked == sum(row["mask"])
        if kind == "agent":
            assert "lookup" in browser.text
            assert "the key is 7" in browser.text
