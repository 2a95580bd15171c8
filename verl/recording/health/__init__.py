"""Health rules: each is a pure function of recorded tables that returns a finding with its figure and remedy, or None.

    run = verl.recording.read(folder)
    findings(load(run, time.time()))

A rule reports the newest period of steps in which its condition held. `findings` calls all of `RULES`; `AlertPoster`
posts new alerts of a run in progress to `trainer.record.alert_url`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.recording.health import learning, operation
from verl.recording.health.run_tables import Cache, Finding, RunTables, load
from verl.recording.reader import read

__all__ = ["RULES", "AlertPoster", "Cache", "Finding", "RunTables", "findings", "load"]

logger = logging.getLogger(__name__)

# Minimum seconds between two checks for alerts, and the maximum share of time that these checks take.
_MIN_CHECK_INTERVAL_S, MAX_CHECK_SHARE = 30.0, 0.01
# Seconds until the same alert is posted again, if it had ended meanwhile.
_REPEAT_S = 3600.0
_POST_TIMEOUT_S = 10.0

RULES: tuple[Callable[[RunTables], Finding | None], ...] = (
    learning.no_signal,
    learning.truncation,
    learning.entropy_collapse,
    learning.constant_reward,
    learning.growing_mismatch,
    learning.diverging_kl,
    learning.exploding_gradient,
    learning.reward_without_validation,
    learning.length_drift,
    learning.common_phrase,
    operation.failing_rewards,
    operation.slow_rewards,
    operation.failing_agents,
    operation.waiting_for_one_rank,
    operation.training_waits_for_generation,
    operation.full_kv_cache,
    operation.preemptions,
    operation.low_mfu,
    operation.idle_devices,
    operation.slow_phase,
    operation.restarts,
    operation.stalled,
)


def findings(tables: RunTables) -> list[Finding]:
    """The findings of all rules: current ones first, alerts before warnings."""
    reported = [finding for rule in RULES if (finding := rule(tables)) is not None]
    return sorted(reported, key=lambda finding: (not finding.is_current, finding.level != "alert", -finding.last_step))


class AlertPoster:
    """Checks the recording at intervals until `close`. An alert is posted once, when it begins, as a JSON object.

    An alert that could not be posted is posted at the next check.
    """

    def __init__(self, folder: Path, url: str, run: Mapping[str, Any], interval: float = _MIN_CHECK_INTERVAL_S) -> None:
        """`folder`: of the recording. `run`: fields of every message, such as the names of the run."""
        self._recording, self._url, self._run = read(folder), url, dict(run)
        self._interval = interval
        self._posted: dict[str, float] = {}
        """By rule with a posted alert: time of the last check at which the alert held."""
        self._cache: Cache = {}
        self._fails = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._check_in_intervals, name="recording-alerts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Check a last time, and end the thread; safe to call twice."""
        self._closing.set()
        self._thread.join(2 * _POST_TIMEOUT_S)

    def _check_in_intervals(self) -> None:
        pause = self._interval
        try:
            while not self._closing.wait(pause):
                pause = max(self._interval, self._check() / MAX_CHECK_SHARE)
            self._check()
        except Exception as error:  # noqa: BLE001 - logged; a missing alert must not end a training run
            logger.warning("trainer.record.alert_url: alerts are not posted any more: %r", error)

    def _check(self) -> float:
        """Post new alerts; return the seconds that the rules took."""
        begin = time.perf_counter()
        current = findings(load(self._recording, time.time(), self._cache))
        seconds = time.perf_counter() - begin
        for finding in current:
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
            status = httpx.post(self._url, json=message, timeout=_POST_TIMEOUT_S).status_code
            problem = None if status < 300 else f"status {status}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = type(error).__name__
        if problem is not None and not self._fails:
            logger.warning("trainer.record.alert_url: the alert %s could not be posted: %s", finding.rule, problem)
        self._fails = problem is not None
        return problem is None
