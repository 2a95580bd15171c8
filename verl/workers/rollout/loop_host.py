"""LoopHost: executes rollout jobs in this process: `submit` takes rows, `collect` returns finished trajectories.

A job is a set of rows with its own sampling parameters. Several jobs can run concurrently, for example validation and a
stream of training rows. Subclasses: `EngineHost` generates single-turn rows with the engine of its process, `AgentHost`
(`verl.agent.worker`) runs agent loops.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import CallCancelled
from verl.types.request import EngineLostError, Output
from verl.types.trajectory import Headers, HostReply, Trajectory
from verl.utils.progress import BackgroundWork, add_work_source, expect, pulse_count, remove_work_source, tick
from verl.workers.rollout.prompts import RolloutJob, RolloutTask, sampling_params

# After the first trajectory has finished, `collect` waits this long for more, to report them together. The wait grows
# with the packing time, up to the maximum, so that packing takes at most this share of the thread's time: engine and
# event loop share its CPU.
COALESCE_S, _MAX_COALESCE_S = 0.02, 0.25
_PACKING_SHARE = 0.1
# Name of the job of `generate_batch`.
_BATCH = "batch"
# Interval of reports of partial outputs.
PARTIALS_S = 2.0


class LoopHost(ABC):
    """Base class of hosts. A host exists while generation is open. All methods are thread-safe."""

    thread_name = "rollout"
    """Name of the generating thread, for hang diagnosis."""
    passes_columns = False
    """Whether tasks get the object columns of their rows."""

    def __init__(
        self,
        config: RolloutConfig,
        end_token_ids: Iterable[int],
        pad_token_id: int,
        get_experts_template: Callable[[], np.ndarray | None] = lambda: None,
    ) -> None:
        """`get_experts_template()` returns an empty array [0, layers, k] if rows always have the column
        `routed_experts`, else None."""
        self.id = uuid.uuid4().hex
        self._config, self._end_token_ids, self._pad_token_id = config, frozenset(end_token_ids), pad_token_id
        self._get_experts_template = functools.cache(get_experts_template)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.jobs: dict[str, RolloutJob] = {}
        self._failure: str | None = None
        self._lost_replica: str | None = None
        self._closed = False
        self._coalesce_s = COALESCE_S
        self._last_job: RolloutJob | None = None
        """The job whose trajectories were collected last."""
        self._busy_since: float | None = None
        """Time at which the host last received rows while it was idle; None: it never had rows."""
        self.next_partials = time.monotonic() + PARTIALS_S

    # ---------------------------------------------------------------- control calls

    def start(self, job: str, meta: Mapping[str, Any], **overrides: Any) -> None:
        """Open a job. `meta`: `meta_info` of the generation (seed, step, validate, end tokens, sampling parameters)."""
        params = sampling_params(self._config, meta, self._end_token_ids, **overrides)
        seed = self._config.seed if meta.get("seed") is None else int(meta["seed"])
        with self._changed:
            self.jobs[job] = RolloutJob(job, meta, params, seed, self._pad_token_id)

    def submit(self, job: str, rows: DataProto, partials: Mapping[str, Output] | None = None) -> None:
        """Start to generate these rows. `partials`: outputs to resume from, by trajectory name.

        Ignored if the host does not have this job: either it has ended, or the call was meant for an earlier host of
        this process, whose loss the manager will handle. ValueError, and no row runs, if a row is invalid.
        """
        open_job = self.jobs.get(job)
        if open_job is None:
            return
        tasks = open_job.tasks(rows, partials or {}, self.passes_columns)
        with self._changed:
            if self._closed:
                return
            if self._busy_since is None:
                add_work_source(self.work)
            if not any(running.unfinished for running in self.jobs.values()):
                self._busy_since = time.monotonic()
            open_job.unfinished |= {task.key: task for task in tasks}
        try:
            self._begin(open_job, tasks)
        except ValueError:  # a row that can never be generated
            self.cancel(job, [task.name for task in tasks])
            raise

    def collect(self, host_id: str, timeout: float, with_partials: bool) -> tuple[HostReply, DataProto | None]:
        """Return trajectories of one job that finished since the last call, and the tensor columns of their rows; block
        up to `timeout` seconds for the first trajectory.

        Called by one thread at a time. If `host_id` is that of an earlier host of this process, the reply is empty and
        `closed`. `with_partials`: also report new tokens of unfinished trajectories, every `PARTIALS_S` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: host_id != self.id or self._has_report(), timeout)
            if self._finished_job() is not None:
                self._changed.wait_for(lambda: host_id != self.id or self._all_finished(), self._coalesce_s)
            if host_id != self.id:
                return HostReply(closed=True), None
            job = self._finished_job()
            finished: list[RolloutTask] = []
            if job is not None:
                finished, job.finished = job.finished, []
                self._last_job = job
            lost, self._lost_replica = self._lost_replica, None
        partials: dict[str, dict[str, Output]] = {}
        if with_partials and time.monotonic() >= self.next_partials:
            partials = {name: self._new_partials(running) for name, running in list(self.jobs.items())}
            self.next_partials = time.monotonic() + PARTIALS_S
        reply = HostReply(
            partials=partials, failure=self._failure, lost_replica=lost, closed=self._closed, pulses=pulse_count()
        )
        if job is None or not finished:
            return reply, None
        started = time.monotonic()
        trajectories = [self._finished_trajectory(job, task) for task in finished]
        rows = job.pack(trajectories, self._get_experts_template())
        objects = rows.pop(non_tensor_batch_keys=list(rows.non_tensor_batch)).non_tensor_batch
        packing_s = time.monotonic() - started
        self._coalesce_s = min(_MAX_COALESCE_S, max(COALESCE_S, packing_s / _PACKING_SHARE))
        return replace(reply, job=job.name, headers=Headers.of(trajectories), objects=objects), rows

    def cancel(self, job: str, names: Iterable[str]) -> None:
        """Cancel these trajectories and discard their results. Tool clean-up runs in the background."""
        with self._changed:
            open_job = self.jobs.get(job)
            if open_job is None:
                return
            tasks = [task for name in names if (task := open_job.unfinished.pop(name, None)) is not None]
            for task in tasks:
                task.cancelled = True
        self._abort(tasks)

    def partials(self, job: str) -> dict[str, Output]:
        """Return the current output of every unfinished trajectory in its first model call, to resume from. Generation
        continues."""
        open_job = self.jobs.get(job)
        return {} if open_job is None else self._current_outputs(open_job)

    def finish(self, job: str) -> None:
        """End a job; its unfinished rows are cancelled."""
        if (open_job := self.jobs.get(job)) is not None:
            self.cancel(job, list(open_job.unfinished))
            with self._changed:
                self.jobs.pop(job, None)

    def reset(self) -> str:
        """End all jobs and return a new id. Calls with the old id, whose replies the caller lost, get empty replies."""
        with self._changed:
            self.id = uuid.uuid4().hex
            self._changed.notify_all()
        for job in list(self.jobs):
            self.finish(job)
        return self.id

    def close(self) -> None:
        """End all jobs; `collect` then reports `closed`."""
        for job in list(self.jobs):
            self.finish(job)
        remove_work_source(self.work)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---------------------------------------------------------------- one batch, in the caller's thread

    def generate_batch(self, prompts: DataProto, overrides: Mapping[str, Any] | None = None) -> DataProto:
        """Generate all rows and return them in order. The host must not be used for anything else meanwhile."""
        job, tasks = self._start_batch(prompts, overrides or {})
        expect(len(tasks))
        try:
            for _ in self._as_finished(job, len(tasks)):
                tick()
        finally:
            self.cancel(job.name, list(job.unfinished))  # after an error, stop the other rows
        return self._batch_rows(job, tasks, prompts)

    def stream_batch(self, prompts: DataProto, overrides: Mapping[str, Any]) -> Iterator[tuple[int, DataProto]]:
        """Yield (row number, batch of one row) as rows finish. Closing the iterator cancels unfinished rows."""
        job, tasks = self._start_batch(prompts, overrides)
        return self._streamed(job, tasks, prompts)

    def _streamed(
        self, job: RolloutJob, tasks: Sequence[RolloutTask], prompts: DataProto
    ) -> Iterator[tuple[int, DataProto]]:
        rows = {task: row for row, task in enumerate(tasks)}
        try:
            for task in self._as_finished(job, len(tasks)):
                yield rows[task], self._batch_rows(job, [task], prompts)
        finally:
            self.cancel(job.name, list(job.unfinished))

    def _start_batch(self, prompts: DataProto, overrides: Mapping[str, Any]) -> tuple[RolloutJob, list[RolloutTask]]:
        sampling = {name: value for name, value in overrides.items() if name != "pad_to_max"}
        meta = {**prompts.meta_info, **{name: overrides[name] for name in overrides if name == "pad_to_max"}}
        self.start(_BATCH, meta, **sampling)
        job = self.jobs[_BATCH]
        tasks = job.tasks(prompts, {}, self.passes_columns)
        for row, task in enumerate(tasks):
            task.key = str(row)
        job.unfinished = {task.key: task for task in tasks}
        self._begin(job, tasks)
        return job, tasks

    def _as_finished(self, job: RolloutJob, count: int) -> Iterator[RolloutTask]:
        """Yield `count` tasks as they finish; raises if the engine fails or the host is closed."""
        while count:
            with self._changed:
                self._changed.wait_for(self._has_report)
                self.raise_if_failed()
                if self._closed:
                    raise CallCancelled("the rollout host was closed")
                finished, job.finished = job.finished, []
            count -= len(finished)
            yield from finished

    def _batch_rows(self, job: RolloutJob, tasks: Sequence[RolloutTask], prompts: DataProto) -> DataProto:
        """Training rows of finished tasks, without `uid` and `sample_index`, which the caller has."""
        rows = job.pack([self._finished_trajectory(job, task) for task in tasks], self._get_experts_template())
        # Without the caller's `uid` and `sample_index`, names are not unique among ranks.
        named = {"uid", "sample_index"} <= prompts.non_tensor_batch.keys()
        rows.pop(non_tensor_batch_keys=["uid", "sample_index", *([] if named else ["trajectory"])])
        return rows

    # ---------------------------------------------------------------- for subclasses

    def raise_if_failed(self) -> None:
        """Raise EngineLostError if a failure prevents rows from finishing."""
        if self._failure is not None or self._lost_replica is not None:
            raise EngineLostError(self._failure or self._lost_replica)

    @property
    def closed(self) -> bool:
        return self._closed

    @abstractmethod
    def _begin(self, job: RolloutJob, tasks: Sequence[RolloutTask]) -> None:
        """Start these tasks; each ends with a call of `_on_finished`, unless it is cancelled or the host fails."""

    @abstractmethod
    def _abort(self, tasks: Sequence[RolloutTask]) -> None:
        """Stop generating these tasks."""

    @abstractmethod
    def _finished_trajectory(self, job: RolloutJob, task: RolloutTask) -> Trajectory:
        """The trajectory of a task with a result."""

    @abstractmethod
    def _new_partials(self, job: RolloutJob) -> dict[str, Output]:
        """Tokens sampled since the last report, by trajectory."""

    @abstractmethod
    def _current_outputs(self, job: RolloutJob) -> dict[str, Output]:
        """Whole outputs so far that can be resumed, by trajectory."""

    def _on_finished(self, job: RolloutJob, task: RolloutTask, result: Any) -> None:
        """Store the result of a task. Called by the engine's thread or the event loop, so it does no other work."""
        with self._changed:
            if task.cancelled or job.unfinished.pop(task.key, None) is None:
                return
            task.result = result
            job.finished.append(task)
            if len(job.finished) == 1 or not job.unfinished:  # otherwise the collector is already coalescing
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        """Report that this host cannot finish its rows."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    # ---------------------------------------------------------------- waiting

    def work(self) -> BackgroundWork | None:
        """Unfinished rows, for hang diagnosis."""
        rows = sum(len(job.unfinished) for job in list(self.jobs.values()))
        return BackgroundWork(f"generation of {rows} rows", self._busy_since or 0.0, self.thread_name) if rows else None

    def _finished_job(self) -> RolloutJob | None:
        """A job with finished trajectories; among several, not the job that was collected last."""
        jobs = [job for job in self.jobs.values() if job.finished]
        return next((job for job in jobs if job is not self._last_job), jobs[0] if jobs else None)

    def _has_report(self) -> bool:
        """Whether `collect` has something to return."""
        broken = self._failure is not None or self._lost_replica is not None
        return self._closed or broken or self._finished_job() is not None

    def _all_finished(self) -> bool:
        """Whether waiting for further trajectories is pointless."""
        return self._closed or not any(job.unfinished for job in self.jobs.values())
