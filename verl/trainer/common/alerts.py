"""AlertPoster: posts new alerts of the health rules to `trainer.record.alert_url`, outside of the critical path."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.recording import health, read
from verl.recording.health import Finding

__all__ = ["AlertPoster"]

logger = logging.getLogger(__name__)

_MIN_INTERVAL_S = 30.0
# Checks take at most this share of the time.
_MAX_SHARE = 0.01
# Seconds until the same alert is posted again, if it had ended meanwhile.
_REPEAT_S = 3600.0
_TIMEOUT_S = 10.0


class AlertPoster:
    """Checks the recording in intervals until `close`. An alert is posted when it begins, as a JSON object.

    An alert that could not be posted is posted at the next check.
    """

    def __init__(self, folder: Path, url: str, run: Mapping[str, Any], interval: float = _MIN_INTERVAL_S) -> None:
        """`folder`: of the recording. `run`: fields of every message, such as the names of the run."""
        self._recording, self._url, self._run = read(folder), url, dict(run)
        self._interval = interval
        self._posted: dict[str, float] = {}
        """By rule: when its alert was last posted, or last held since."""
        self._cache: health.Cache = {}
        self._fails = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._check_in_intervals, name="recording-alerts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Check a last time, and end the thread; safe to call twice."""
        self._closing.set()
        self._thread.join(2 * _TIMEOUT_S)

    def _check_in_intervals(self) -> None:
        pause = self._interval
        try:
            while not self._closing.wait(pause):
                pause = max(self._interval, self._check() / _MAX_SHARE)
            self._check()
        except Exception as error:  # noqa: BLE001 - logged; a missing alert must not end a training run
            logger.warning("trainer.record.alert_url: alerts are not posted any more: %r", error)

    def _check(self) -> float:
        """Post what is new; return the seconds that the rules took."""
        begin = time.perf_counter()
        findings = health.findings(health.load(self._recording, time.time(), self._cache))
        seconds = time.perf_counter() - begin
        for finding in findings:
            if finding.level == "alert" and finding.is_current:
                is_new = time.monotonic() - self._posted.get(finding.rule, -_REPEAT_S) >= _REPEAT_S
                if not is_new or self._post(finding):
                    self._posted[finding.rule] = time.monotonic()
        return seconds

    def _post(self, finding: Finding) -> bool:
        """Post an alert; return whether the server accepted it. The address may contain a secret: it is not logged."""
        import httpx

        settings = [f"{key}={value}" for key, value in finding.settings]
        name = self._run.get("experiment", "")
        text = f"{name}, step {finding.last_step}: {finding.title} {finding.figure} {finding.remedy}"
        message = {
            "text": " ".join([text.strip(), *settings]),
            **self._run,
            **finding._asdict(),
            "settings": dict(finding.settings),
        }
        try:
            status = httpx.post(self._url, json=message, timeout=_TIMEOUT_S).status_code
            problem = None if status < 300 else f"status {status}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = type(error).__name__
        if problem is not None and not self._fails:
            logger.warning("trainer.record.alert_url: the alert %s could not be posted: %s", finding.rule, problem)
        self._fails = problem is not None
        return problem is None
