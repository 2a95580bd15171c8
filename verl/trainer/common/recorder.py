"""Recorder: records metrics, phases, events and samples of a run for `verl.recording`, outside of the critical path.

RankPoll is its thread that collects compute calls, engine load and device use of all ranks. It uses control calls,
which run concurrently with the work of the ranks: training never waits for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.config import RunConfig
from verl.planning.phases import GB, MemoryPlan
from verl.recording import schema
from verl.recording.health import AlertPoster
from verl.recording.redaction import Redaction
from verl.recording.writer import RecordWriter
from verl.single_controller.base.worker import RankUsage
from verl.trainer.common.checkpoint import SaveResult
from verl.trainer.common.run_status import RunStatus
from verl.trainer.recovery.step_end import NonFatalFailures
from verl.utils.concurrency import JobThread
from verl.utils.fs import expand_path
from verl.utils.progress import GENERATING
from verl.utils.py_functional import mask_secrets
from verl.workers.rollout.base import Load

logger = logging.getLogger(__name__)

KEY = "trainer.record"
# Maximum number of warnings recorded per message template, and in total: a warning in every step must not fill the
# recording.
_MAX_WARNINGS, _MAX_ALL_WARNINGS = 20, 1000
_CONTROLLER = "controller"
# Time limit for writing the last records at the end of a run, and of a run that a signal ends immediately.
_CLOSE_TIMEOUT_S, _KILLED_TIMEOUT_S = 60.0, 2.0

# Seconds between two records of engines and devices: the first value or, if longer, this share of the run's time so
# far. The number of records of a long run therefore grows with the logarithm of its time only.
MIN_INTERVAL_S, _INTERVAL_SHARE = 5.0, 1 / 2000
# Seconds between two polls, if steps are shorter.
MIN_POLL_S = 1.0
_TIMEOUT_S = 10.0
# Number of consecutive failed polls after which polling stops.
_MAX_FAILURES = 5

Groups = Callable[[], Mapping[str, Any]]
"""Returns the worker groups of the run by role; {} before they are started."""


class Recorder:
    """Open between `open` and `close`; otherwise, or with `trainer.record.enable=False`, nothing is recorded.

    Its methods only put records into a queue. The seconds that they take are counted (`end_step`).
    """

    def __init__(
        self,
        config: RunConfig,
        program: str,
        status: RunStatus,
        subfolder: str = "",
        thread: JobThread | None = None,
    ) -> None:
        """`program`: ppo, sft or rm. `status`: its phases are recorded. `subfolder`: of the run's folder; "": none.
        `thread`: writes the files (None: one of its own)."""
        self._config, self._program, self._status, self._thread = config, program, status, thread
        self.settings = config.record
        self.redaction = Redaction(self.settings.redact)
        self.folder = Path(expand_path(config.default_local_dir)).absolute() / subfolder / schema.FOLDER
        self._writer: RecordWriter | None = None
        self._poll: RankPoll | None = None
        self._alerts: AlertPoster | None = None
        self._handler: WarningHandler | None = None
        self.memory_plan: MemoryPlan | None = None
        """Planned memory of the run, if known; set before `open`."""
        self._seconds = 0.0
        self._totals: dict[str, float] = {}

    def open(
        self,
        first_step: int,
        config: Mapping[str, Any],
        groups: Groups,
        resumed_from: Path | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Begin to record an attempt. The caller owns the run's folder.

        `tokenizer`: its vocabulary is recorded; it must not be used by another thread.
        """
        if not self.settings.enable or self._writer is not None:
            return
        self._status.spans.clear()
        settings, trainer = self.settings, self._config
        run = {
            "program": self._program,
            "project": trainer.project_name,
            "experiment": trainer.experiment_name,
            "budget": {"max_mb_per_step": settings.max_mb_per_step, "max_gb": settings.max_gb},
            "texts": settings.texts,
            "config": mask_secrets(config),
        }
        run_id = os.environ.get("VERL_RUN")
        budget = int(settings.max_gb * 1e9)
        writer = RecordWriter(self.folder, run, first_step, budget, self.redaction, run_id, self._thread)
        self._writer = writer
        place = {"first_step": first_step, "host": socket.gethostname(), "pid": os.getpid()}
        kind, source = ("start", None) if resumed_from is None else ("resume", str(resumed_from))
        self.event(kind, max(0, first_step - 1), data=place | ({} if source is None else {"folder": source}))
        if self.memory_plan is not None:
            self.event("memory_plan", max(0, first_step - 1), data=planned_memory(self.memory_plan))
        self._handler = WarningHandler(writer, self._status, settings.texts)
        logging.getLogger("verl").addHandler(self._handler)
        if settings.alert_url is not None:
            names = {name: run[name] for name in ("program", "project", "experiment")}
            self._alerts = AlertPoster(self.folder, settings.alert_url, names | {"folder": str(self.folder.parent)})
        self._poll = RankPoll(groups, writer, max(0, first_step - 1))
        if settings.texts and tokenizer is not None and not (self.folder / schema.TOKENS_FILE).exists():
            writer.submit(lambda: writer.write_tokens(vocabulary(tokenizer)), step=None)

    def close(self, step: int, error: BaseException | None = None) -> None:
        """Write everything that was recorded, and end the attempt; safe to call twice. `error`: why the run ends."""
        if self._writer is None:
            return
        self._record_phases(step)
        if self._poll is not None:
            self._poll.close(poll=error is None)
        logging.getLogger("verl").removeHandler(self._handler)  # type: ignore[arg-type]
        message = "" if error is None else f"{type(error).__name__}: {error}".strip()
        self.event("end", step, message if self.settings.texts else message.partition(":")[0])
        writer, self._writer = self._writer, None
        is_killed = error is not None and not isinstance(error, Exception)
        writer.close(_KILLED_TIMEOUT_S if is_killed else _CLOSE_TIMEOUT_S)
        if self._alerts is not None and not is_killed:
            self._alerts.close()

    def event(self, kind: str, step: int, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Record an event of a kind of `schema.EVENTS`. Thread-safe."""
        if self._writer is not None:
            self._writer.event(kind, step, message, data)

    def saved(self, save: SaveResult) -> None:
        """Record a complete checkpoint. Thread-safe."""
        if save.error is None:
            data = {"seconds": round(save.seconds, 3), "gigabytes": save.gigabytes, "path": str(save.path)}
            self.event("checkpoint", save.step, data=data)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step, the phases that have ended, and events that follow from the metrics."""
        if self._writer is None:
            return
        with self.timed():
            data = {name: _plain(value) for name, value in metrics.items()}
            self._writer.line("metrics", {"step": step, "time": round(time.time(), 3), "data": data})
            for kind, counts in events_of(data, self._totals).items():
                self.event(kind, step, data=counts)
            self._totals = {name: value for name, value in data.items() if name.startswith("training/failed_")}
            self._record_phases(step)

    def end_step(self, step: int, failures: NonFatalFailures) -> dict[str, float]:
        """Collect the calls of the ranks in this step, in the background; return the seconds that recording took in the
        trainer's thread. An error of the writer's thread is a non-fatal failure."""
        if self._writer is None:
            return {}
        if self._poll is not None:
            with self.timed():
                self._poll.step_ended(step)
        failures.dump(KEY, str(self.folder), step, self._writer.raise_error)
        seconds, self._seconds = self._seconds, 0.0
        return {"timing_s/record": seconds}

    def submit(self, job: Callable[[RecordWriter], None], step: int) -> None:
        """Run `job(writer)` in the writer's thread. If too many jobs wait, the oldest is skipped, with an event."""
        if self._writer is not None:
            self._writer.submit(partial(job, self._writer), step)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to the seconds that `end_step` returns."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start

    def _record_phases(self, step: int) -> None:
        writer, spans = self._writer, self._status.spans
        assert writer is not None
        host, pid = socket.gethostname(), os.getpid()
        for span in [spans.popleft() for _ in range(len(spans))]:
            record = {"step": step, "track": _CONTROLLER, "phase": span.name, "host": host, "pid": pid}
            writer.line("phases", record | {"start": round(span.start, 4), "end": round(span.end, 4)})


class WarningHandler(logging.Handler):
    """Records warnings and errors of the log as events."""

    def __init__(self, writer: RecordWriter, status: RunStatus, texts: bool) -> None:
        super().__init__(logging.WARNING)
        self._writer, self._status, self._texts = writer, status, texts
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        template = str(record.msg)
        if self._counts[template] >= _MAX_WARNINGS or self._counts.total() >= _MAX_ALL_WARNINGS:
            return
        self._counts[template] += 1
        try:
            # The arguments may contain texts of the model.
            message = record.getMessage() if self._texts else template
        except Exception:  # noqa: BLE001 - reported as by all handlers: arguments that do not match the message
            self.handleError(record)
            return
        self._writer.event("warning", self._status.step, message, {"level": record.levelname, "logger": record.name})


def events_of(metrics: Mapping[str, Any], totals: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return events that follow from the metrics of a step: kind → counts. `totals`: failures until the step before."""
    # Groups without signal: asynchronous runs also count groups that dynamic sampling has not seen.
    rejected = "async/rejected" if "async/rejected" in metrics else "filter_groups/dropped_groups"
    dropped = {
        name: value
        for name, value in metrics.items()
        if (name.startswith("async/dropped/") or name == rejected) and value
    }
    errors = {
        name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("reward/errors/") and value
    }
    failed = {
        name.removeprefix("training/failed_"): value - totals.get(name, 0)
        for name, value in metrics.items()
        if name.startswith("training/failed_") and value > totals.get(name, 0)
    }
    events = {"dropped_groups": dropped, "failed_rewards": errors, "failed": failed}
    return {kind: counts for kind, counts in events.items() if counts}


def planned_memory(plan: MemoryPlan) -> dict[str, Any]:
    """Return the data of an event `memory_plan`: GB of tensors per device by phase, comparable with the metrics
    `memory_gb/<phase>`, and the GB of a device."""
    phases = {phase.phase: round(phase.allocated / GB, 3) for phase in plan.phases if not phase.on_host}
    return {"gb": phases, "device_gb": None if plan.device is None else round(plan.device.total / GB, 3)}


def vocabulary(tokenizer: Any) -> dict[str, list[Any]]:
    """Return the columns of the stream `tokens`."""
    ids = list(range(len(tokenizer)))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    return {
        "id": ids,
        "piece": tokenizer.convert_ids_to_tokens(ids),
        "text": tokenizer.batch_decode([[token] for token in ids]),
        "special": [token in special for token in ids],
    }


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) or hasattr(value, "item") else value


class RankPoll:
    """A thread that polls all ranks at the end of each step, and in intervals."""

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
        self._is_enabled = True
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
        self._is_enabled = self._is_enabled and poll
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._step_ends, self._interval())
                closing = self._closing
            if not closing:
                time.sleep(MIN_POLL_S)  # calls of several short steps are collected together
            self._poll()

    def _interval(self) -> float:
        return max(MIN_INTERVAL_S, (time.time() - self._start) * _INTERVAL_SHARE)

    def _poll(self) -> None:
        if not self._is_enabled:
            with self._wake:
                self._step_ends.clear()
            return
        ended_steps = len(self._step_ends)  # later ones may have calls that this query does not return
        try:
            ranks = self._query()
        except Exception as error:  # a missing record must not end a training run
            self._failures += 1
            logger.debug("recording: the ranks could not be queried", exc_info=True)
            if self._failures == _MAX_FAILURES:
                self._is_enabled = False
                logger.warning("recording: calls of ranks and loads of engines are not recorded any more: %r", error)
            return
        self._failures = 0
        self._record_spans(ranks, ended_steps)
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

    def _record_spans(self, ranks: Mapping[tuple[str, int], RankUsage], ended_steps: int) -> None:
        with self._wake:
            ends = list(self._step_ends)
            del self._step_ends[:ended_steps]
            next_step = self._step + 1
        for (_, rank), usage in ranks.items():
            for span in usage.spans:
                track = f"engine/{rank}" if span.name == GENERATING else self._tracks[usage.host, usage.pid]
                step = next((step for end, step in ends if span.start < end), next_step)
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
            tokens = increase(last.generated_tokens_total, load.generated_tokens_total)
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
                    "preemptions": increase(last.preemptions_total, load.preemptions_total),
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


def increase(before: int | None, now: int | None) -> int | None:
    """Return the increase of a counter; None if it is unknown or decreased: a restarted engine counts from 0."""
    return None if before is None or now is None or now < before else now - before
