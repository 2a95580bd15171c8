"""A headless browser for the tests of the viewer and for the screenshots of the documentation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TIMEOUT_S = 20


def missing_browser() -> str | None:
    """Return a message that names the missing program; None if a browser can be opened."""
    return next(
        (f"{name} is not installed" for name in ("chromium", "chromedriver") if shutil.which(name) is None), None
    )


@contextmanager
def open_browser(width: int = 1400, height: int = 1100) -> Iterator[Browser]:
    """Open Debian's chromium with selenium; close it when the block ends."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    # The sandbox of chromium cannot be used by root in a container; the pages are our own.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A headless browser with the actions that the tests need. `errors` returns the errors in the page's console."""

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
        message = f"the condition {condition} was not fulfilled; text of the page: {self.text[:500]}"
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
