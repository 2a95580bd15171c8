"""EngineHost: a LoopHost that generates single-turn rows with the engine of its process, and executes the requests of
EngineClients, which agent loops use."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from verl.config import RolloutConfig
from verl.types.request import EngineDiedError, Output, Request, unfinished_part
from verl.types.trajectory import Trajectory, Turn
from verl.utils.exceptions import fields_as_keys
from verl.utils.progress import GENERATING, BusySpans, StoppedProcess, pulse_count, stopped_helper
from verl.workers.rollout.loop_host import LoopHost
from verl.workers.rollout.prompts import RolloutJob, RolloutTask

# `num_turns` of a single-turn row: prompt and response, as SingleTurnAgentLoop counts them.
_SINGLE_TURNS = 2


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one request of an EngineClient: an output or an error message."""

    id: str
    output: Output | None
    refused: str | None = None
    """Error message: the request is invalid."""
    failed: str | None = None
    """Error message: the engine failed and cannot generate any more; `EngineHost.close` raises the error."""


@dataclass(frozen=True, slots=True)
class CollectedOutputs:
    """One reply to an EngineClient."""

    outputs: list[RequestOutput]
    unfinished: int
    """Number of unfinished requests in the engine, of all clients and jobs."""
    pulses: int
    """Progress counter of the engine's process: it changes as long as there is progress."""
    closed: bool
    """The host is closed: there will be no further outputs."""
    stopped_process: StoppedProcess | None = None
    """A process of the engine that is stopped (by a signal or a debugger), for hang diagnosis."""
    partials: dict[str, Output] = field(default_factory=dict)
    """If requested: tokens sampled since the last report, by request id."""


class RequestEngine(Protocol):
    """The part of `BaseRollout` that generates."""

    config: RolloutConfig
    eos_token_ids: frozenset[int]
    pad_token_id: int

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]: ...

    def abort(self, ids: Iterable[str] | None = None) -> None: ...

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]: ...


class EngineHost(LoopHost):
    """Submits all rows of a call to the engine at once. The engine's thread only stores results; the thread that calls
    `collect` packs them. There is no coroutine, thread or RPC per row."""

    def __init__(
        self, rollout: RequestEngine, get_experts_template: Callable[[], np.ndarray | None] = lambda: None
    ) -> None:
        super().__init__(rollout.config, rollout.eos_token_ids, rollout.pad_token_id, get_experts_template)
        self.rollout = rollout
        self._error: BaseException | None = None
        self._futures: dict[str, Future[Output]] = {}
        """Unfinished requests of rows and clients."""
        self._busy = BusySpans(GENERATING)
        self._requests: dict[RolloutTask, Request] = {}
        """Requests of unfinished rows."""
        self.outputs: dict[str, list[RequestOutput]] = defaultdict(list)
        """By client: results that it has not collected."""
        self._conditions: dict[str, threading.Condition] = {}
        self._reported: dict[str, dict[str, int]] = defaultdict(dict)
        """By client and unfinished request: the number of tokens reported to the client."""

    # ---------------------------------------------------------------- requests of EngineClients

    def submit_requests(self, client: str, requests: Sequence[Request]) -> None:
        """Queue requests; `collect_outputs` of the same client returns their results or errors. Never raises."""
        if self._closed:
            return  # `collect_outputs` reports that the host is closed
        try:
            futures = self.rollout.submit(requests)
        except ValueError as error:
            if len(requests) > 1:
                for request in requests:
                    self.submit_requests(client, [request])
            else:
                self._store(client, RequestOutput(requests[0].id, None, refused=_with_keys(error)))
        except Exception as error:  # noqa: BLE001 - reported to the clients, raised by `close`
            for request in requests:
                self._fail_request(client, request.id, error)
        else:
            with self._changed:
                self._futures |= {request.id: future for request, future in zip(requests, futures, strict=True)}
                self._busy.set(len(self._futures))
                for request in requests:
                    resumed_tokens = len(request.resume_from.token_ids) if request.resume_from else 0
                    self._reported[client][request.id] = resumed_tokens
                closed_meanwhile = self._closed
            for request, future in zip(requests, futures, strict=True):
                future.add_done_callback(partial(self._on_request_done, client, request.id))
            if closed_meanwhile:
                self.abort_requests(request.id for request in requests)

    def collect_outputs(self, client: str, timeout: float, with_partials: bool = False) -> CollectedOutputs:
        """Return results of this client's requests since its last call; block up to `timeout` seconds for the first.

        Called by one thread per client at a time.
        """
        with self._changed:
            self._client_changed(client).wait_for(lambda: self._closed or bool(self.outputs.get(client)), timeout)
        partials = self._partials_of_client(client) if with_partials else {}
        with self._changed:
            outputs = self.outputs.pop(client, [])
            return CollectedOutputs(
                outputs, len(self._futures), pulse_count(), self._closed, stopped_helper(), partials
            )

    def current_outputs(self, ids: Sequence[str]) -> dict[str, Output]:
        """Return the current outputs of these requests; requests without tokens are left out. Generation continues."""
        return self._tokens_since(dict.fromkeys(ids, 0))

    def abort_requests(self, ids: Iterable[str]) -> None:
        """Abort these requests at the next token."""
        self.rollout.abort(list(ids))

    def abort_clients(self) -> None:
        """Abort the requests of all clients, whose processes have ended."""
        with self._changed:
            ids = [request_id for requests in self._reported.values() for request_id in requests]
            self._reported.clear()
            self.outputs.clear()
        self.rollout.abort(ids)

    def _partials_of_client(self, client: str) -> dict[str, Output]:
        with self._changed:
            reported = self._reported[client]
            positions = dict(reported)
        partials = self._tokens_since(positions)
        with self._changed:
            for name, piece in partials.items():
                if name in reported:
                    reported[name] += len(piece.token_ids)
        return partials

    def _on_request_done(self, client: str, request_id: str, future: Future[Output]) -> None:
        """Called by the engine's thread."""
        with self._changed:
            self._futures.pop(request_id, None)
            self._busy.set(len(self._futures))
            has_client = self._reported[client].pop(request_id, None) is not None
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._fail_request(client, request_id, error)
        elif has_client:  # otherwise `abort_clients` was called, and no client would collect the output
            self._store(client, RequestOutput(request_id, replace(future.result(), raw_log_probs=[])))

    def _fail_request(self, client: str, request_id: str, error: BaseException) -> None:
        self._fail_with(error)
        self._store(client, RequestOutput(request_id, None, failed=f"{type(error).__name__}: {error}"))

    def _store(self, client: str, output: RequestOutput) -> None:
        with self._changed:
            self.outputs[client].append(output)
            self._client_changed(client).notify_all()

    def _client_changed(self, client: str) -> threading.Condition:
        """One condition per client, with the host's lock: an output wakes only its own client."""
        if client not in self._conditions:
            self._conditions[client] = threading.Condition(self._lock)
        return self._conditions[client]

    # ---------------------------------------------------------------- single-turn rows

    def _begin(self, job: RolloutJob, tasks: Sequence[RolloutTask]) -> None:
        requests = [(task, request) for task in tasks if (request := self._request(job, task)) is not None]
        try:
            futures = self.rollout.submit([request for _, request in requests])
        except ValueError as error:
            if not job.agent_columns:
                raise
            if len(tasks) == 1:
                self._on_finished(job, tasks[0], error)
            else:  # only the invalid row fails, as with agent loops
                for task in tasks:
                    self._begin(job, [task])
            return
        except Exception as error:  # noqa: BLE001 - raised by `raise_if_failed` and `close`
            self._fail_with(error)
            return
        with self._changed:
            self._futures |= {request.id: future for (_, request), future in zip(requests, futures, strict=True)}
            self._busy.set(len(self._futures))
            self._requests |= dict(requests)
            late = [task for task, _ in requests if task.cancelled or self._closed]
        started = time.monotonic()
        for (task, request), future in zip(requests, futures, strict=True):
            future.add_done_callback(partial(self._on_row_done, job, task, request.id, started))
        self._abort(late)  # cancelled before the request was submitted

    def _request(self, job: RolloutJob, task: RolloutTask) -> Request | None:
        """The request of a row. None if the prompt leaves no room in the context: the row then finishes with an empty
        response."""
        limit = task.limit
        if job.agent_columns:
            limit = min(limit, self._config.max_model_len - len(task.trajectory.rows[0].prompt_ids))
            if limit <= 0:
                self._on_finished(job, task, (Output(finish_reason="length"), 0.0))
                return None
        return job.request(task, limit)

    def _abort(self, tasks: Sequence[RolloutTask]) -> None:
        with self._changed:
            ids = [self._requests[task].id for task in tasks if task in self._requests]
        if ids:
            self.rollout.abort(ids)

    def _on_row_done(
        self, job: RolloutJob, task: RolloutTask, request_id: str, started: float, future: Future[Output]
    ) -> None:
        """Called by the engine's thread."""
        with self._changed:
            self._futures.pop(request_id, None)
            self._busy.set(len(self._futures))
            self._requests.pop(task, None)
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                self._fail_with(error)
            else:
                self._on_finished(job, task, (future.result(), time.monotonic() - started))

    def _finished_trajectory(self, job: RolloutJob, task: RolloutTask) -> Trajectory:
        trajectory = task.trajectory
        if isinstance(task.result, ValueError):
            output, seconds, error = Output(finish_reason="abort"), 0.0, f"ValueError: {_with_keys(task.result)}"
            trajectory.status = "failed"
        else:
            (output, seconds), error = task.result, None
            trajectory.status = "aborted" if output.finish_reason == "abort" else "finished"
        trajectory.rows[0].turns.append(_packed_turn(output))
        if job.agent_columns:
            metrics = _agent_metrics(output, seconds) | {"status": trajectory.status, "error": error}
            if error is not None:
                metrics["failures"] = {"loop": 1}
            trajectory.extra = {"num_turns": _SINGLE_TURNS, "agent_metrics": metrics}
        return trajectory

    # ---------------------------------------------------------------- partial outputs

    def _new_partials(self, job: RolloutJob) -> dict[str, Output]:
        with self._changed:
            tasks = {self._requests[task].id: task for task in job.unfinished.values() if task in self._requests}
        pieces = self._tokens_since({request_id: task.reported for request_id, task in tasks.items()})
        for request_id, piece in pieces.items():
            tasks[request_id].reported += len(piece.token_ids)
        return {tasks[request_id].name: piece for request_id, piece in pieces.items()}

    def _current_outputs(self, job: RolloutJob) -> dict[str, Output]:
        with self._changed:
            requests = [(task.name, self._requests[task]) for task in job.unfinished.values() if task in self._requests]
        outputs = self.current_outputs([request.id for _, request in requests])
        return {
            name: unfinished_part(outputs[request.id], request.params)
            for name, request in requests
            if request.id in outputs
        }

    def _tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        try:
            pieces = self.rollout.tokens_since(positions)
        except EngineDiedError:  # the requests fail with this error, which reports it
            return {}
        return {name: replace(piece, raw_log_probs=[]) for name, piece in pieces.items()}

    # ---------------------------------------------------------------- failures, end

    @property
    def failed(self) -> bool:
        """Whether the engine has failed."""
        return self._error is not None

    def raise_if_failed(self) -> None:
        """Raise the engine's error, if it has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all jobs and requests; raise the engine's error, if it has failed."""
        super().close()
        with self._changed:
            for condition in self._conditions.values():
                condition.notify_all()
            unfinished = dict(self._futures)
        self.rollout.abort(unfinished)
        wait(unfinished.values())
        self.raise_if_failed()

    def _fail_with(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self._fail(f"{type(error).__name__}: {error}")


def _packed_turn(output: Output) -> Turn:
    """The turn of an output, with lists converted to arrays once, not once per use."""
    turn = Turn.sampled(output)
    turn.token_ids = np.asarray(output.token_ids, np.int32)
    versions = output.versions
    if versions and versions[0] == versions[-1]:  # versions never decrease
        turn.versions = np.full(len(versions), versions[0], np.int64)
    return turn


def _agent_metrics(output: Output, seconds: float) -> dict[str, Any]:
    """Column `agent_metrics` of a single-turn row, with the same keys as that of agent loops."""
    return {
        "generate_s": seconds,
        "tool_s": 0.0,
        "compute_score_s": 0.0,
        "tool_calls": 0,
        "num_preempted": output.preemptions,
        "turns": 1,
        "failures": {},
        "tools": {},
        "unmatched_tokens": 0,
    }


def _with_keys(error: ValueError) -> str:
    """The error message, with configuration keys in place of the engine's field names."""
    try:
        with fields_as_keys("actor_rollout_ref.rollout", RolloutConfig):
            raise error
    except ValueError as error_with_keys:
        return str(error_with_keys)
