"""RolloutManager: the trainer's interface to generation.

Each consumer (a sync step, an async stream, validation, the engine probe) opens a job, submits rows to it and collects
finished trajectories; `rollout_jobs.join_rows` converts them to a batch.

Hosts (`LoopHost`) execute the jobs: the first rollout rank of each replica generates single-turn rows, loop workers run
agents. The manager stores every unfinished row with its last reported partial output. If a host is lost, its rows are
submitted to another host; after `WorkerRecovery._readmit` has restarted it, `open` sends it rows again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.single_controller.base.heartbeat import OpenCall
from verl.single_controller.base.worker_group import CallCancelled, HangError, WorkerDiedError, WorkerError
from verl.single_controller.ray.column_store import StoredRows
from verl.trainer.ppo.rollout_jobs import (
    FinishedTrajectory,
    HostKind,
    HostLoss,
    HostState,
    ManagedJob,
    OnFinished,
    RolloutHosts,
    SubmittedRow,
    finished_trajectories,
    join_rows,
    trajectory_names,
)
from verl.trainer.ppo.row_balancing import select_columns_for
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.types.request import Output, resumable
from verl.types.trajectory import HostReply
from verl.utils.progress import expect, pulse, tick
from verl.workers.rollout.prompts import with_row_names

logger = logging.getLogger(__name__)

# Interval in which a wait for trajectories checks for cancellation and lost hosts.
POLL_S = 0.5


class RolloutManager:
    """Used by the trainer's thread. Only `open` and `close` use the compute lane of the ranks."""

    def __init__(self, config: PPOConfig, groups: WorkerGroups) -> None:
        self.config, self._groups = config, groups
        self.hosts = RolloutHosts(groups, self._receive, self._report_loss)
        self.needs_open = False
        """A host or a replica was lost: `open` has to connect again."""
        self.jobs: dict[str, ManagedJob] = {}
        self._serial = itertools.count()
        self.calls: list[OpenCall] = []
        self._cancelled = threading.Event()

    # ---------------------------------------------------------------- opening and closing

    @property
    def is_open(self) -> bool:
        """Whether hosts are connected."""
        return bool(self.hosts.all)

    def open(self) -> None:
        """Open generation on engines and loop workers until `close`. No effect if it is open and no host was lost.

        Call it again after a WorkerError and recovery: rows of lost hosts are then submitted to other hosts and resume
        from their last partial outputs.
        """
        if self.is_open and not self.needs_open:
            return
        if self.is_open:
            self._groups.require_engines()
        self.needs_open = False  # set again by a host that is lost during `_connect`
        try:
            self._connect()
        except Exception:
            self.needs_open = True
            raise

    def _connect(self) -> None:
        """Connect to all hosts, start new hosts, and send the rows that have no host."""
        self._unassign_rows(self.hosts.connect())
        for host in self.hosts.all:
            if host.closed:
                for job in self.jobs.values():
                    host.handle.call("host.start", job.name, job.meta)
                self.hosts.start_collecting(host)
        for job in self.jobs.values():
            self._send(job, [name for name, row in list(job.rows.items()) if row.host is None])

    def close(self) -> None:
        """End all jobs and close generation; raise the error of a failed engine, if there is one."""
        self.jobs.clear()
        self.hosts.close()

    def abandon(self) -> None:
        """Stop processing replies, because the run has failed."""
        self.hosts.abandon()

    def cancel_waiting(self) -> None:
        """Make `collect` raise CallCancelled from now on. Thread-safe."""
        self._cancelled.set()

    # ---------------------------------------------------------------- jobs

    def start(self, meta: Mapping[str, Any], on_finished: OnFinished = lambda finished: None) -> str:
        """Start a job and return its id.

        `meta`: `meta_info` of the generation (seed, end tokens, sampling parameters). `on_finished` is called with
        finished trajectories as they arrive, by the collector thread of their host.
        """
        job = ManagedJob(f"job-{next(self._serial)}", dict(meta), on_finished)
        self.jobs[job.name] = job
        self.hosts.call_all([(host, "host.start", job.name, job.meta) for host in self.hosts.all])
        return job.name

    def submit(
        self, job: str, rows: DataProto, partials: Mapping[str, Output] | None = None, replica: int | None = None
    ) -> list[str]:
        """Submit rows for generation; return their ids (`uid`/`sample_index`).

        All rows of a prompt are sent to the host with the fewest rows, or to host number `replica`. `partials`: outputs
        to resume from, by row id. If generation is not open, the next `open` sends the rows.
        """
        names = self._add_rows(self.jobs[job], rows, partials or {})
        assigned = dict.fromkeys(names, self.hosts.all[replica]) if replica is not None and self.is_open else {}
        self._send(self.jobs[job], names, assigned)
        return names

    def _add_rows(self, job: ManagedJob, rows: DataProto, partials: Mapping[str, Output]) -> list[str]:
        """Add rows to a job; return their ids."""
        names = trajectory_names(rows)
        lengths = rows.batch["attention_mask"].sum(-1).tolist()
        kinds = self._host_kinds(rows)
        for index, name in enumerate(names):
            parts = [partials[name]] if name in partials else []
            job.rows[name] = SubmittedRow(rows, index, lengths[index], kinds[index], parts)
        return names

    def collect(self, job: str, timeout: float) -> list[FinishedTrajectory]:
        """Return the trajectories finished since the last call; block up to `timeout` seconds for the first one.

        Raises the WorkerError of a lost host or engine. After recovery, call `open` and continue to collect.
        """
        self._check_cancelled()
        managed = self.jobs[job]
        event = managed.next_event(timeout)
        while isinstance(event, HostLoss):
            self._raise_loss(event)  # returns if the loss was recovered
            event = managed.next_event(timeout=0)
        return [] if event is None else [*event, *managed.take_finished()]

    def take_finished(self, job: str) -> list[FinishedTrajectory]:
        """Like `collect`, but without blocking. Errors are left to the next `collect`."""
        return self.jobs[job].take_finished()

    def cancel(self, job: str, ids: Sequence[str]) -> None:
        """Cancel these rows and discard their results."""
        by_host: dict[HostState, list[str]] = {}
        for name in ids:
            row = self.jobs[job].rows.pop(name, None)
            if row is not None and row.host is not None:
                by_host.setdefault(row.host, []).append(name)
        for host, names in by_host.items():
            self.hosts.call(host, "host.cancel", job, names)

    def partials(self, job: str) -> dict[str, Output]:
        """Return the current partial outputs, by row id, of rows in their first model call. Generation continues."""
        rows = list(self.jobs[job].rows.items())
        outputs = {name: resumable(partial) for name, row in rows if (partial := row.partial) is not None}
        for host in self.hosts.all:
            try:
                outputs |= host.handle.call("host.partials", job)
            except WorkerError as error:  # raised by the next `collect`; the last reported outputs are returned
                logger.warning("current partial outputs of %s could not be read: %s", host.handle, error)
        return {name: output for name, output in outputs.items() if output.token_ids}

    def finish(self, job: str) -> None:
        """End a job and cancel its unfinished rows."""
        self.jobs.pop(job, None)
        for host in self.hosts.all:
            if not host.closed:
                self.hosts.call_if_alive(host, "host.finish", job)

    # ---------------------------------------------------------------- one batch

    def generate(
        self,
        rows: DataProto,
        meta: Mapping[str, Any],
        on_finished: OnFinished = lambda finished: None,
        retry: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> DataProto:
        """Generate one batch. Its trajectories are in the order of `rows`; all rows of a trajectory are adjacent.

        Rows are assigned to hosts by position. If `rows` lacks `uid` or `sample_index`, the batch has no column
        `trajectory`. `retry(call)` returns `call()`, and restarts lost workers and repeats the call if it fails.
        """
        if self._groups.overrides_generate_sequences:
            batch: DataProto = retry(partial(self._call_generate_sequences, rows, meta))
            return batch
        named = with_row_names(rows)
        # Another job may be active: the engine probe generates during the recovery of a batch.
        was_open = self.is_open or bool(self.jobs)
        job = self.start(meta, on_finished)
        try:
            retry(self.open)
            ids = self.submit_by_position(job, named)
            finished: dict[str, FinishedTrajectory] = retry(partial(self._wait, job, len(ids), {}))
            if not was_open:
                retry(self.close)  # all trajectories have arrived: losing a worker now does not affect the batch
        except HangError:
            self.abandon()  # a hanging worker would not reply to further calls either
            raise
        except BaseException:
            self._end_batch(job, was_open)
            raise
        self._end_batch(job, was_open)
        generated = join_rows([finished[name] for name in ids])
        if named is not rows:
            generated.pop(non_tensor_batch_keys=["trajectory"])
        return generated

    def _end_batch(self, job: str, was_open: bool) -> None:
        if was_open:
            self.finish(job)
        else:
            self.close()  # ends the job; raises the error of a failed engine, which is the cause of other errors

    def _wait(self, job: str, count: int, finished: dict[str, FinishedTrajectory]) -> dict[str, FinishedTrajectory]:
        """Wait until `finished` contains `count` trajectories of a job, and return it. It can be called again with the
        same `finished` after a WorkerError."""
        with self.monitored():
            while len(finished) < count:
                self.open()
                new = self.collect(job, POLL_S)
                finished |= {trajectory.name: trajectory for trajectory in new}
                tick(len(new))
        return finished

    def submit_by_position(self, job: str, rows: DataProto) -> list[str]:
        """Submit rows to hosts by their position in the batch (`assign_by_position`); return their ids."""
        managed = self.jobs[job]
        names = self._add_rows(managed, rows, {})
        expect(len(rows))
        self._send(managed, names, self.hosts.assign_by_position({name: managed.rows[name].kind for name in names}))
        return names

    def _call_generate_sequences(self, rows: DataProto, meta: Mapping[str, Any]) -> DataProto:
        """Generate a batch with one call of the `generate_sequences` of a user's worker class."""
        request = rows.select()
        request.meta_info = dict(meta)
        if self._groups.agents is None:
            return self._groups.rollout.generate_sequences(request)
        was_open, replicas = self._groups.generation_open, self._groups.open_generation()
        try:
            return self._groups.agents.generate_sequences(request, [handle for handle, _ in replicas])
        finally:
            if not was_open:
                self._groups.close_generation()

    # ---------------------------------------------------------------- hosts

    @contextmanager
    def monitored(self) -> Iterator[None]:
        """Context of a wait for trajectories: the hang detector monitors the worker groups and can end the wait."""
        groups = [group for group in self._groups.generation_groups if hasattr(group, "processes")]
        outer, self.calls = self.calls, [OpenCall(group, "collect") for group in groups]
        try:
            yield
        finally:
            for call in self.calls:
                call.close()
            self.calls = outer  # contexts are nested if the engine probe generates during the recovery of a stream

    @property
    def uses_ray(self) -> bool:
        """Whether rows of finished trajectories are in Ray's object store; otherwise in this process."""
        return self._groups.uses_ray

    @property
    def engine_count(self) -> int:
        """Number of engine replicas; 0 if generation is not open."""
        return len(self.hosts.of_kind("engine"))

    @property
    def loop_capacity(self) -> int | None:
        """Maximum number of trajectories that loop workers run concurrently; None if the default agent loop does not
        run in loop workers."""
        agent = self.config.actor_rollout_ref.rollout.agent
        if self._groups.is_single_turn(agent.default_agent_loop):
            return None
        return agent.max_concurrent_requests * len(self.hosts.of_kind("agent"))

    def _host_kinds(self, rows: DataProto) -> list[HostKind]:
        """Return the kind of host for each row: rollout ranks for single-turn rows, loop workers for agents."""
        agents = rows.non_tensor_batch.get("agent_name")
        default = self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        names = [default] * len(rows) if agents is None else [str(name) for name in agents]
        single = {name: self._groups.is_single_turn(name) for name in set(names)}
        return ["engine" if single[name] else "agent" for name in names]

    def _unassign_rows(self, lost: Sequence[HostState]) -> None:
        """Unassign the rows of lost hosts; they will resume from their last partial outputs."""
        for row in self._unfinished_rows():
            if row.host in lost:
                row.host = None
                row.parts = [] if (partial := row.partial) is None else [resumable(partial)]
        if any(host.kind == "agent" for host in lost):  # loop workers are restarted together
            for host in self.hosts.of_kind("engine"):
                self.hosts.call_if_alive(host, "host.abort_clients")

    def _send(
        self, job: ManagedJob, names: Sequence[str], assigned: Mapping[str, HostState] = MappingProxyType({})
    ) -> None:
        """Send rows to the hosts in `assigned`, and the others to the least loaded host, all rows of a prompt to the
        same one. Does nothing if generation is not open: `open` will send the rows."""
        if not self.is_open:
            return
        rows = {name: row for name in names if (row := job.rows.get(name)) is not None}
        loads = Counter(row.host for row in self._unfinished_rows()) if len(assigned) < len(rows) else Counter()
        group_hosts: dict[tuple[HostKind, str], HostState] = {}
        by_host: dict[tuple[int, int], tuple[HostState, DataProto, list[str]]] = {}
        for name, row in rows.items():
            group = row.kind, name.rpartition("/")[0]
            if name not in assigned and group not in group_hosts:
                group_hosts[group] = self.hosts.least_loaded(row.kind, loads)
            host = row.host = assigned[name] if name in assigned else group_hosts[group]
            loads[host] += 1
            by_host.setdefault((id(host), id(row.batch)), (host, row.batch, []))[2].append(name)
        calls = []
        for host, batch, chosen in by_host.values():
            part = batch if len(chosen) == len(batch) else batch.select_idxs(np.array([rows[n].index for n in chosen]))
            if host.kind == "engine":  # engines read few columns, agents may read all
                part = select_columns_for(part, "generate")
                part.meta_info = batch.meta_info
            partials = {name: partial for name in chosen if (partial := rows[name].partial) is not None}
            resumed = {name: partial for name, partial in partials.items() if partial.token_ids}
            calls.append((host, "host.submit", job.name, part, resumed))
        self.hosts.call_all(calls)

    def _unfinished_rows(self) -> list[SubmittedRow]:
        """Return the unfinished rows of all jobs."""
        return [row for job in self.jobs.values() for row in list(job.rows.values())]

    def _report_loss(self, host: HostState, error: Exception | None) -> None:
        """Add a HostLoss to the inboxes of all jobs. The next `collect` raises it, unless `open` has replaced the host
        by then."""
        self.needs_open = True
        for job in list(self.jobs.values()):
            job.inbox.put(HostLoss(host, error))

    def _raise_loss(self, loss: HostLoss) -> None:
        """Raise the error of a lost engine, if there is one, since it is the cause; otherwise the error of the host.

        All hosts of a lost group report the loss to all jobs, but it is recovered once: reports about hosts that were
        replaced are ignored, and so is the death of a rank that was restarted meanwhile (for example by a weight sync).
        """
        if loss.host not in self.hosts.all and (loss.error is None or isinstance(loss.error, WorkerError)):
            return
        self._groups.require_engines()
        was_restarted = loss.host.kind == "engine" and isinstance(loss.error, WorkerDiedError)
        if loss.error is not None and not was_restarted:
            raise loss.error

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CallCancelled("waiting for trajectories was cancelled")
        for call in self.calls:
            if call.abort_error is not None:
                raise call.abort_error

    def _receive(self, host: HostState, reply: HostReply, rows: StoredRows | None) -> None:
        """Process a reply, in the collector thread of its host."""
        if reply.pulses != host.pulses:
            host.pulses = reply.pulses
            pulse()
        finished: list[FinishedTrajectory] = []
        with self.hosts.lock:
            if host.closed:
                return  # its rows were submitted to another host, or cancelled
            for job_name, partials in reply.partials.items():
                if (job_of_partials := self.jobs.get(job_name)) is not None:
                    job_of_partials.add_partials(partials)
            job = self.jobs.get(reply.job or "")
            if job is not None and rows is not None:
                received = finished_trajectories(reply, rows)
                finished = [item for item in received if job.rows.pop(item.name, None) is not None]
        if job is not None and finished:
            job.on_finished(finished)
            job.inbox.put(finished)
        if reply.lost_replica is not None:
            self._report_loss(host, None)
