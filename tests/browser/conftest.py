"""Fixtures of the tests of the viewer: a browser (without one the tests are skipped), recordings, a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.browser import Browser, missing_browser, open_browser
from tests.support.recordings import close, open_writer, write_run
from verl.utils.http_server.server import ConnectionLimits, serve_in_thread
from verl.viewer.run import ViewedRun
from verl.viewer.server import create_viewer_app

Serve: TypeAlias = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    pytest.importorskip("selenium.webdriver")
    if (reason := missing_browser()) is not None:
        pytest.skip(reason)
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def serve(browser: Browser) -> Serve:
    """`with serve(folder, …) as address`: serve recordings; the browser leaves the page before the server stops."""

    @contextmanager
    def serve_folders(*folders: Path) -> Iterator[str]:
        app = create_viewer_app([ViewedRun(folder) for folder in folders])
        with serve_in_thread(app, "runs", limits=ConnectionLimits(grace_seconds=1)) as port:
            yield f"http://127.0.0.1:{port}/"
            browser.driver.get("about:blank")

    return serve_folders


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("recorded"), steps=6, experiment="first", trainer={"lr": 1})


@pytest.fixture(scope="session")
def second(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("second"), steps=4, experiment="second", trainer={"lr": 2})


@pytest.fixture(scope="session")
def supervised(tmp_path_factory) -> Path:
    """A run with metrics only, as verl sft records."""
    folder = tmp_path_factory.mktemp("supervised")
    writer = open_writer(folder, "sft")
    for step in range(1, 4):
        writer.line("metrics", {"step": step, "time": 10.0 * step, "data": {"train/loss": 2.0 / step, "val/loss": 2.5}})
    writer.event("end", 3)
    close(writer)
    return folder


@pytest.fixture(scope="session")
def address(serve, recorded) -> Iterator[str]:
    with serve(recorded) as url:
        yield url
