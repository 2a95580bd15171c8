"""Every page of `verl view` in a browser: contents, keyboard, live updates, hostile texts, export, other folders."""

from __future__ import annotations

import shutil

import pytest

from tests.support.recordings import UIDS, close, open_writer, write_step, write_supervised_run, write_vocabulary
from verl.viewer.export import write_export
from verl.viewer.run import ViewedRun

pytestmark = pytest.mark.browser
PAGES = ("overview", "timeline", "groups", "answer", "validation", "health")


@pytest.fixture(autouse=True)
def no_errors(browser):
    browser.errors()
    yield
    assert browser.errors() == []
    assert "owned" not in browser.driver.title, "a text was executed"


def test_overview_has_charts_config_and_health(browser, address):
    browser.open(address)
    titles = browser.evaluate("[...document.querySelectorAll('figcaption')].map((e) => e.textContent)")
    assert {"Reward", "Validation (band: 95 % interval)", "Entropy (nats)", "Step time (s)"} <= set(titles)
    browser.wait("document.querySelector('.findings').innerText.includes('No finding')")
    assert "first" in browser.text
    browser.screenshot("overview")


def test_overview_compares_runs_and_their_configurations(browser, serve, recorded, second):
    with serve(recorded, second) as url:
        browser.open(f"{url}#overview?axis=tokens&smooth=0.5&log=1")
        assert "Differences of the configurations (1 of 1 keys)" in browser.text
        assert "trainer.lr" in browser.text
        keys = "[...document.querySelectorAll('figure')].map((e) => e.querySelectorAll('.legend .key').length)"
        assert browser.evaluate(keys)[0] == 2
        browser.click(".run input")
        browser.wait(f"{keys}[0] === 0")  # the legend is shown for several series only


def test_timeline_has_tracks_breakdown_and_waits(browser, address):
    browser.open(f"{address}#timeline?step=3")
    label = browser.evaluate("document.querySelector('.page canvas').ariaLabel")
    assert "controller idle 0 %" in label
    assert "actor/1 idle 90 %" in label
    assert "Who waited for whom" in browser.text
    assert "2.0 s" in browser.text
    browser.press("]")
    browser.wait("location.hash.includes('step=4')")
    browser.screenshot("timeline")


def test_a_tokens_log_prob_is_two_clicks_from_a_step(browser, address):
    browser.open(f"{address}#groups?step=2")
    assert "3 groups, 6 responses" in browser.text
    assert "1 without signal" in browser.text
    browser.screenshot("groups")
    browser.click("tr.link", 2)
    browser.wait("document.querySelectorAll('.card').length === 2")
    browser.screenshot("group")
    browser.click(".card a", 1)
    browser.wait("document.querySelectorAll('.token[data-index]').length === 6")
    point = "{bubbles: true, clientX: 5, clientY: 5}"
    browser.evaluate(
        f"document.querySelector('[data-index=\"1\"]').dispatchEvent(new PointerEvent('pointerover', {point}))"
    )
    tip = browser.evaluate("document.getElementById('tooltip').innerText")
    assert "-1" in tip
    assert "0.75" in tip, "trainer − rollout"
    browser.screenshot("answer")


def test_groups_are_filtered_and_searched(browser, address):
    browser.open(f"{address}#groups?step=2&filter=none")
    assert browser.evaluate("document.querySelectorAll('tr.link').length") == 1
    browser.evaluate("document.querySelector('input[type=search]').value = 'needle'")
    browser.click("form button")
    browser.wait("document.querySelectorAll('.hits li').length === 2")
    assert browser.evaluate("document.querySelector('mark').textContent") == "needle"
    browser.wait("document.querySelector('form button[type=button]').hidden")  # nothing to stop
    assert "rewards in the table: 0" in browser.text


def test_an_answer_marks_trained_tokens_and_tool_results(browser, address):
    browser.open(f"{address}#answer?step=2&uid={UIDS[2]}&sample=0")
    classes = browser.evaluate("[...document.querySelectorAll('.token[data-index]')].map((e) => e.classList[1])")
    assert classes == ["trained", "trained", "masked", "masked", "trained", "trained"]
    assert browser.evaluate("document.querySelectorAll('details.turn pre.environment').length") == 1
    details = browser.evaluate("document.querySelector('.details').innerText")
    assert "tool_calls 2" in details
    assert "tool_s 0.1235" in details
    assert "tools" not in details, "empty values are left out"
    assert "not JSON, <b>markup</b>" in details
    browser.press("\ue014")  # the right arrow
    browser.wait("location.hash.includes('sample=1')")


def test_validation_lists_newly_correct_and_newly_wrong(browser, address):
    browser.open(f"{address}#validation?step=4&from=2")
    assert "Newly correct or better (1)" in browser.text
    assert "Newly wrong or worse (1)" in browser.text
    browser.click("tr.link", 1)
    browser.wait("document.body.innerText.includes('Responses over time')")
    assert browser.evaluate("document.querySelectorAll('section details.turn').length") == 3
    browser.screenshot("validation")


def test_validations_that_cannot_be_compared_say_why(browser, serve, tmp_path):
    writer = open_writer(tmp_path)
    for step in (1, 2):
        write_step(writer, step)
    writer.event("end", 2)
    close(writer)
    with serve(tmp_path) as url:
        browser.open(f"{url}#validation")
        assert "only one validation" in browser.text
        colours = "[...document.querySelectorAll('.scale')].map((e) => e.innerText.split(/\\s+/).join(' '))"
        assert browser.evaluate(colours) == ["wrong correct"]


def test_ticks_of_steps_are_whole_numbers(browser, address):
    browser.open(address)
    results = "[m.ticks(0, 2, 6, 1), m.ticks(0, 2, 4)]"
    script = f"import('/static/chart.js').then((m) => arguments[0]({results}))"
    assert browser.driver.execute_async_script(script) == [[0, 1, 2], [0, 0.5, 1, 1.5, 2]]


def test_health_has_findings_with_remedies_and_events(browser, serve, tmp_path):
    writer = open_writer(tmp_path, data={"max_response_length": 64})
    for step in range(1, 6):
        write_step(writer, step, {"response_length/clip_ratio": 0.5, "response_length/mean": 60.0})
    writer.event("end", 5, "ValueError: <b>broken</b>")
    close(writer)
    with serve(tmp_path) as url:
        browser.open(f"{url}#health")
        assert "data.max_response_length=128" in browser.text
        assert "50%" in browser.text
        assert "<b>broken</b>" in browser.text
        browser.screenshot("health")


@pytest.mark.parametrize("page", PAGES)
def test_hostile_texts_are_shown_and_not_executed(browser, address, page):
    place = {"groups": f"?step=2&uid={UIDS[1]}", "answer": f"?step=2&uid={UIDS[1]}&sample=0&text=1"}.get(page, "")
    place = f"?uid={UIDS[1]}" if page == "validation" else place
    browser.open(f"{address}#{page}{place}")
    if page in ("groups", "answer", "validation"):
        browser.wait("document.body.innerText.includes('<script>')")
        assert "␛[31m⟨U+202E⟩" in browser.text
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.parametrize(("stream", "page"), [("rows", "groups"), ("rows", "answer"), ("pairs", "groups")])
def test_hostile_texts_of_supervised_runs_are_shown_and_not_executed(browser, serve, tmp_path, stream, page):
    with serve(write_supervised_run(tmp_path, streams=[stream])) as url:
        browser.open(f"{url}#{page}?step=1&uid={UIDS[0]}&text=1")
        browser.wait("document.body.innerText.includes('<script>')")
        assert "␛[31m⟨U+202E⟩" in browser.text
        assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0


def test_injected_code_is_blocked_by_the_policy(browser, address):
    browser.open(address)
    browser.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = \"document.title='owned'\";"
        " document.body.append(s); const i = document.createElement('img'); i.setAttribute('onerror', s.textContent);"
        " i.src = 'data:,'; document.body.append(i); })()"
    )
    browser.wait("true")
    assert "owned" not in browser.driver.title
    blocked = browser.errors()
    assert blocked
    assert all("Content Security Policy" in message for message in blocked)


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_runs_without_answers(browser, serve, supervised, page):
    with serve(supervised) as url:
        browser.open(f"{url}#{page}")
        assert "sft" in browser.text
        if page == "overview":
            assert "Training loss" in browser.text


def test_live_runs_are_followed(browser, serve, tmp_path):
    writer = open_writer(tmp_path, "followed")
    write_vocabulary(writer)
    write_step(writer, 1)
    with serve(tmp_path) as url:
        browser.open(f"{url}#groups")
        browser.wait("document.querySelector('header').innerText.includes('live')")
        write_step(writer, 2)
        browser.wait("document.querySelector('header').innerText.includes('step 2')")
        browser.wait("document.querySelector('input[type=number]')?.value === '2'")
        writer.event("end", 2)
        close(writer)
        browser.wait("!document.querySelector('header').innerText.includes('live')")


def test_an_exported_file_works_without_a_server(browser, recorded, tmp_path):
    write_export([ViewedRun(recorded)], tmp_path / "run.html")
    for page in PAGES:
        browser.open(f"file://{tmp_path}/run.html#{page}")
        assert "Only search is left out" in browser.text
        assert "not in the exported file" not in browser.text
    browser.open(f"file://{tmp_path}/run.html#answer?step=2&uid={UIDS[2]}&sample=0")
    assert browser.evaluate("document.querySelectorAll('.token[data-index]').length") == 6


@pytest.mark.parametrize("name", ["metrics.jsonl", "groups/00000002.parquet", "trajectories/00000002.parquet"])
def test_truncated_files_leave_the_rest_readable(browser, serve, recorded, tmp_path, name):
    shutil.copytree(recorded, tmp_path / "run")
    path = tmp_path / "run/record" / name
    path.write_bytes(path.read_bytes()[:-20])
    with serve(tmp_path / "run") as url:
        browser.open(f"{url}#groups?step=3")
        assert "3 groups, 6 responses" in browser.text
        if name.startswith("groups"):
            browser.open(f"{url}#groups?step=2")
            assert "is damaged" in browser.text
            browser.errors()  # the browser logs the status 404


def test_narrow_screens_and_dark_mode(browser, address):
    browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    )
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        for page in PAGES:
            browser.open(f"{address}#{page}")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
            assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
            browser.screenshot(f"narrow-{page}")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_all_pages_are_reached_by_keys(browser, address):
    browser.open(address)
    for number, page in enumerate(PAGES, 1):
        browser.press(str(number))
        browser.wait(f"document.querySelector('main > .page.{page}')")
