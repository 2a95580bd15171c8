"""RankPoll: a thread that collects compute calls, engine load and device use of all ranks for the recording.

It uses control calls, which run concurrently with the ranks' work: training never waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from verl.recording.writer import RecordWriter
from verl.single_controller.base.worker import RankUsage
from verl.utils.progress import GENERATING
from verl.workers.rollout.base import Load

logger = logging.getLogger(__name__)

# Seconds between records of the series: at least the first, at least this share of the run's time so far. The number of
# records thus grows with the logarithm of the time.
_MIN_INTERVAL_S, _INTERVAL_SHARE = 5.0, 1 / 2000
# Seconds between two polls, if steps are shorter.
_MIN_POLL_S = 1.0
_TIMEOUT_S = 10.0
# Consecutive failed polls after which it stops to poll.
_MAX_FAILURES = 5

Groups = Callable[[], Mapping[str, Any]]
"""Returns the worker groups of the run by role; {} before they are started."""


class RankPoll:
    """Polls at the end of each step, and in intervals. `close` polls a last time."""

    def __init__(self, groups: Groups, writer: RecordWriter, step: int) -> None:
        """`step`: the last completed step."""
        self._groups, self._writer = groups, writer
        self._step_ends: list[tuple[float, int]] = []
        self._step = step
        self._wake = threading.Condition()
        self._closing = False
        self._start = self._last_series = time.time()
        self._engines: dict[str, tuple[float, Load]] = {}
        """By engine: time and load of the last record."""
        self._tracks: dict[tuple[str, int], str] = {}
        """Name of every process (host, pid): its first role and rank."""
        self._failures = 0
        """Consecutive polls that failed."""
        self._works = True
        self._thread = threading.Thread(target=self._run, name="recording-ranks", daemon=True)
        self._thread.start()

    def step_ended(self, step: int) -> None:
        """Collect the calls of the ranks, which belong to this step if they began before now."""
        with self._wake:
            self._step_ends.append((time.time(), step))
            self._step = step
            self._wake.notify()

    def close(self, poll: bool) -> None:
        """End the thread. `poll`: collect the last calls first; False if ranks may be dead."""
        self._works = self._works and poll
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._step_ends, self._interval())
            if not self._closing:
                time.sleep(_MIN_POLL_S)  # calls of several short steps are collected together
            self._poll()

    def _interval(self) -> float:
        return max(_MIN_INTERVAL_S, (time.time() - self._start) * _INTERVAL_SHARE)

    def _poll(self) -> None:
        if not self._works:
            with self._wake:
                self._step_ends.clear()
            return
        try:
            ranks = self._query()
        except Exception as error:  # a missing record must not end a training run
            self._failures += 1
            logger.debug("recording: the ranks could not be queried", exc_info=True)
            if self._failures == _MAX_FAILURES:
                self._works = False
                logger.warning("recording: calls of ranks and loads of engines are not recorded any more: %r", error)
            return
        self._failures = 0
        self._record_spans(ranks)
        if self._closing or time.time() - self._last_series >= self._interval():
            self._last_series = time.time()
            self._record_engines(ranks)
            self._record_devices(ranks)

    def _query(self) -> dict[tuple[str, int], RankUsage]:
        """Return the use of every rank by role and rank. Ranks that do not reply in time are left out."""
        ranks: dict[tuple[str, int], RankUsage] = {}
        for role, group in self._groups().items():
            if hasattr(group, "rank_usage"):  # worker classes of users may not have it
                replies = group.query_ranks("rank_usage", _TIMEOUT_S)
                ranks |= {(role, rank): reply for rank, reply in enumerate(replies) if isinstance(reply, RankUsage)}
        for (role, rank), usage in ranks.items():
            self._tracks.setdefault((usage.host, usage.pid), f"{role}/{rank}")
        return ranks

    def _record_spans(self, ranks: Mapping[tuple[str, int], RankUsage]) -> None:
        with self._wake:
            ends, self._step_ends = self._step_ends, []
        for (_, rank), usage in ranks.items():
            for span in usage.spans:
                track = f"engine/{rank}" if span.name == GENERATING else self._tracks[usage.host, usage.pid]
                step = next((step for end, step in ends if span.start < end), self._step + 1)
                record = {"step": step, "track": track, "phase": span.name, "host": usage.host, "pid": usage.pid}
                self._writer.line("phases", record | {"start": round(span.start, 4), "end": round(span.end, 4)})

    def _record_engines(self, ranks: Mapping[tuple[str, int], RankUsage]) -> None:
        now = time.time()
        for (_, rank), usage in ranks.items():
            if usage.load is None:
                continue
            engine, load = f"engine/{rank}", usage.load
            before, last = self._engines.get(engine, (now, load))
            self._engines[engine] = (now, load)
            tokens = _increase(last.generated_tokens_total, load.generated_tokens_total)
            rate = None if tokens is None or now <= before else round(tokens / (now - before), 2)
            self._writer.line(
                "engines",
                {
                    "time": round(now, 3),
                    "engine": engine,
                    "running": load.requests_running,
                    "waiting": load.requests_waiting,
                    "tokens_per_s": rate,
                    "kv_used": load.kv_cache_used,
                    "preemptions": _increase(last.preemptions_total, load.preemptions_total),
                    "kv_bytes": load.kv_cache_bytes,
                    "weight_version": load.weight_version,
                },
            )

    def _record_devices(self, ranks: Mapping[tuple[str, int], RankUsage]) -> None:
        by_device: dict[tuple[str, str], dict[tuple[str, int], RankUsage]] = defaultdict(dict)
        for usage in ranks.values():
            if usage.device is not None:
                by_device[usage.host, usage.device.uuid].setdefault((usage.host, usage.pid), usage)
        for (host, uuid), processes in by_device.items():
            device = next(iter(processes.values())).device
            assert device is not None
            self._writer.line(
                "devices",
                {
                    "time": round(time.time(), 3),
                    "device": uuid,
                    "host": host,
                    "tracks": [self._tracks[process] for process in processes],
                    "name": device.name,
                    "memory_used": device.memory_used,
                    "memory_total": device.memory_total,
                    "memory_tensors": sum(usage.tensor_bytes for usage in processes.values()),
                    "utilization": device.utilization,
                    "power": device.power,
                },
            )


def _increase(before: int | None, now: int | None) -> int | None:
    """Increase of a counter; None if it is unknown, or smaller than before: a restarted engine counts from 0."""
    return None if before is None or now is None or now < before else now - before
