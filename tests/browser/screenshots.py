"""Screenshots of all pages of a recorded run, for the documentation.

    make train ALGO=grpo && python -m tests.browser.screenshots runs/quickstart/grpo docs/figures

Needs chromium, chromedriver and selenium, as `make test-browser`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.browser import open_browser
from verl.utils.http_server.server import ConnectionLimits, serve_in_thread
from verl.viewer.run import ViewedRun
from verl.viewer.server import create_viewer_app

_WIDTH, _HEIGHT = 1280, 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("target", type=Path, help="folder of the images")
    parser.add_argument("--prefix", default="view", help="beginning of the names of the images")
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)
    run = ViewedRun(options.run)
    app = create_viewer_app([run])
    with (
        serve_in_thread(app, "runs", limits=ConnectionLimits(grace_seconds=1)) as port,
        open_browser(_WIDTH, _HEIGHT) as browser,
    ):
        for name, place in pages(run).items():
            browser.open(f"http://127.0.0.1:{port}/#{place}")
            browser.wait("!document.body.innerText.includes('checking…')")  # findings appear after the charts
            browser.driver.save_screenshot(str(options.target / f"{options.prefix}-{name}.png"))
        browser.driver.get("about:blank")


def pages(run: ViewedRun) -> dict[str, str]:
    """Name of the image and place of the page: the group with the largest spread of scores in the newest step, and a
    prompt of validation that became correct."""
    places = {"overview": "overview", "timeline": "timeline", "health": "health"}
    steps = run.summary()["steps"]
    if steps["trajectories"]:
        step = steps["trajectories"][-1]
        columns = run.groups(step)["columns"]
        spread = [value or 0.0 for value in columns["score_std"]]
        uid = columns["uid"][spread.index(max(spread))]
        places |= {
            "groups": f"groups?step={step}",
            "group": f"groups?step={step}&uid={uid}",
            "answer": f"answer?step={step}&uid={uid}&sample=0",
        }
    if steps["validation"]:
        first, last = steps["validation"][0], steps["validation"][-1]
        places["validation"] = f"validation?step={last}&from={first}"
    return places


if __name__ == "__main__":
    main()
