"""All pages on recordings of real runs: sync with validation, asynchronous, agents with tools, SFT, reward model."""

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


def test_texts_and_tokens_are_those_of_the_run(browser, serve, run):
    kind, folder = run
    {"sft": _check_rows, "rm": _check_pairs}.get(kind, _check_responses)(browser, serve, kind, folder)


def _check_rows(browser, serve, kind, folder):
    run = recording.read(folder)
    step = run.rows.steps[-1]
    row = run.rows.table(step=step).to_pylist()[1]
    with serve(folder) as url:
        browser.open(f"{url}#groups")
        assert f"{len(run.rows.table(step=step))} rows" in browser.text
        for text in (row["prompt"], "mean loss of the rows"):
            assert text in browser.text
        browser.open(f"{url}#answer?step={step}&uid={row['uid']}")
        browser.wait("document.querySelectorAll('.token[data-index]').length > 0")
        assert browser.evaluate("document.querySelectorAll('.token.trained[data-index]').length") == sum(row["mask"])
        masked = browser.evaluate("document.querySelectorAll('.token.masked[data-index]').length")
        assert masked == len(row["mask"]) - sum(row["mask"])
        assert "not trained · " in browser.text
        value = f"{row['trainer_log_probs'][0]:.8g}"[:6]
        event = "new PointerEvent('pointerover', {bubbles: true})"
        browser.evaluate(f"document.querySelector('.token[data-index]').dispatchEvent({event})")
        assert value in browser.evaluate("document.getElementById('tooltip').textContent")
        browser.open(f"{url}#answer?step={step}&uid={row['uid']}&text=1")
        assert row["turns"][1]["text"] in browser.text
        browser.open(f"{url}#groups?step={step}")
        browser.evaluate("document.querySelector('tr.link').click()")
        browser.wait("location.hash.startsWith('#answer')")


def _check_pairs(browser, serve, kind, folder):
    run = recording.read(folder)
    step = run.pairs.steps[-1]
    pairs = run.pairs.table(step=step).to_pylist()
    pair = next(pair for pair in pairs if pair["correct"] is not None)
    with serve(folder) as url:
        browser.open(f"{url}#groups?step={step}&uid={pair['uid']}")
        assert f"{len(pairs)} pairs" in browser.text
        cards = browser.evaluate("[...document.querySelectorAll('#pair .card pre')].map((card) => card.textContent)")
        assert cards == [pair["chosen"], pair["rejected"]]
        assert pair["prompt"] in browser.text
        browser.evaluate("document.querySelector('tr.link:last-child').click()")
        browser.wait(f"!location.hash.includes('{pair['uid']}')")
        (first, *_) = run.validation.table(step=4).to_pylist()
        browser.open(f"{url}#validation?uid={first['uid']}")
        assert "3 prompts in both: correct" in browser.text
        for text in ("chosen", "rejected", first["turns"][1]["text"]):
            assert text in browser.text


def _check_responses(browser, serve, kind, folder):
    recorded = recording.read(folder)
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
