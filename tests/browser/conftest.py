"""A browser for the tests of the viewer: Debian's chromium with selenium. Without them the tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.recordings import close, open_writer, write_run
from verl.utils.http_server.server import ConnectionLimits, serve_in_thread
from verl.viewer.run import ViewedRun
from verl.viewer.server import create_viewer_app

_TIMEOUT_S = 20
Serve: TypeAlias = Callable[..., AbstractContextManager[str]]


class Browser:
    """A headless browser with the few actions that the tests need. `errors` are those of the page's console."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Open a page of the viewer and wait until it is complete."""
        self.driver.get("about:blank")
        self.driver.get(address)
        self.wait("document.querySelector('main > .page') && document.querySelector('main').ariaBusy === 'false'")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        script = f"return Boolean({condition})"
        message = f"the page never fulfilled: {condition}; its text: {self.text[:500]}"
        WebDriverWait(self.driver, _TIMEOUT_S, 0.05).until(lambda driver: driver.execute_script(script), message)

    def evaluate(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def click(self, selector: str, number: int = 0) -> None:
        self.driver.execute_script(f"document.querySelectorAll({selector!r})[{number}].click()")

    def press(self, key: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.TAG_NAME, "body").send_keys(key)

    @property
    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def screenshot(self, name: str) -> None:
        """Save a screenshot to the folder VERL_SCREENSHOTS, if that is set."""
        folder = os.environ.get("VERL_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("no chromium or chromedriver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # The sandbox of chromium cannot be used by root in a container; the pages are our own.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1100"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


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
