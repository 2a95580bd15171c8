"""EngineClient: generates with the engine replicas of a run, for agent loops and the gateway.

A `request_id` identifies a conversation: all of its turns are sent to the same replica, whose prefix cache has their
context. A first turn is sent to the replica with the fewest requests, or to the replica of its group if that has at
most `_GROUP_EXTRA_LOAD` more. If a replica is lost, its requests resume on another replica from the reported tokens.

Requests created in one iteration of the event loop are sent in one call, and one pending call per replica returns
outputs: there is no RPC per token or per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.single_controller.base.worker_group import RankHandle, WorkerError
from verl.types.request import (
    EngineLostError,
    Output,
    Request,
    SamplingParams,
    TokenOutput,
    join_outputs,
    output_to_resume,
    unfinished_part,
)
from verl.utils.counter_noise import sample_key
from verl.utils.progress import StoppedProcess, add_peer, pulse, remove_peer
from verl.workers.rollout.call_trace import CallTrace, current_trace
from verl.workers.rollout.engine_host import CollectedOutputs, RequestOutput
from verl.workers.rollout.prompts import parse_sampling_params

logger = logging.getLogger(__name__)

# Sampling parameters of other engines that are accepted without effect: log-probs are always reported, and a request
# has one response.
_IGNORED_PARAMS = frozenset({"logprobs", "n", "skip_special_tokens", "detokenize"})
# Timeout of one call for outputs. Shorter than the limits of hang detection, because every reply reports progress.
COLLECT_S = 2.0
# Hang reports name replicas that made no progress for this long.
STALLED_S = 10.0
# Timeout of reading current outputs for a checkpoint. A replica that does not respond is left out.
FETCH_S = 10.0
# Interval in which replicas report partial outputs.
PARTIALS_S = 2.0
# The replica of a group, which has its prompt in the prefix cache, may have this many more requests than the least
# loaded one and still be chosen.
_GROUP_EXTRA_LOAD = 8
# Maximum number of conversations, and of groups, whose replica is remembered.
MAX_STORED_REPLICAS = 16_384


@dataclass(slots=True, eq=False)
class _Replica:
    """State of the connection to one replica."""

    handle: RankHandle
    client: str
    """Name under which outputs are collected from the replica."""
    waiting: dict[str, asyncio.Future[Output]] = field(default_factory=dict)
    """Unfinished requests of this client, by id."""
    unsent: list[Request] = field(default_factory=list)
    """Requests of this iteration of the event loop, sent together at its end."""
    partials: dict[str, Output] = field(default_factory=dict)
    """Reported tokens of unfinished requests, by id."""
    other_requests: int = 0
    """Number of unfinished requests of other clients and jobs, as last reported."""
    pulses: int = 0
    """The last reported progress counter of the engine."""
    last_progress: float = field(default_factory=time.monotonic)
    stopped_process: StoppedProcess | None = None
    """The engine's process if it is stopped, for hang reports."""
    closed: bool = False
    """Whether this client has disconnected."""
    lost: str | None = None
    """Why the replica cannot generate any more; None: it can."""

    @property
    def load(self) -> int:
        """Number of unfinished requests of all clients."""
        return self.other_requests + len(self.waiting)

    def describe_stall(self) -> str | None:
        """For hang detection: a description of the replica if it has requests and makes no progress, else None.
        Thread-safe."""
        seconds = time.monotonic() - self.last_progress
        if not self.waiting or seconds < STALLED_S:
            return None
        engine = ""
        if self.stopped_process is not None:
            engine = "; its engine's process (pid {}) is {}".format(*self.stopped_process)
        requests = len(self.waiting)
        return f"{self.handle}, whose engine made no progress for {seconds:.0f} s ({requests} requests{engine})"


class EngineClient:
    """Shared by all trajectories of a process. Methods must be called in the thread of the event loop."""

    def __init__(
        self,
        handles: Sequence[RankHandle],
        params: SamplingParams,
        max_model_len: int,
        client: str,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[str], None],
        first_preferred: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        """`params` are defaults that the loop or its job may override. `client`: a unique name of this client.
        `on_lost(reason)` is called when a replica is lost; its requests resume on other replicas, or wait for
        `reconnect`. `first_preferred`: index of the replica that is chosen first if all are equally loaded; clients
        with different values spread their requests. Token ids outside of `vocab_size` are rejected.
        """
        self._params, self._max_model_len, self._client = params, max_model_len, client
        self._loop, self._on_lost, self._vocab_size = loop, on_lost, vocab_size
        self._replica_of_conversation: OrderedDict[str, _Replica] = OrderedDict()
        self._replica_of_group: OrderedDict[str, _Replica] = OrderedDict()
        self._serial = itertools.count()
        self._next_preferred = first_preferred
        self._reconnected = asyncio.Event()
        """Set, and replaced, by `reconnect`."""
        self._closed = False
        self._first_calls: dict[CallTrace, tuple[Request, _Replica]] = {}
        self.generating = 0
        """Number of unfinished requests."""
        self.replicas = [self._connect(handle, client) for handle in handles]

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """Generate a continuation of `prompt_ids`, one turn of the conversation `request_id`.

        `sampling_params`: fields of `SamplingParams`. The response is limited by `rollout.max_new_tokens`, which counts
        all tokens after the first prompt of the context (also those of tools), and by `max_model_len`. If a limit is
        already reached, the response is empty with finish reason `length`.
        """
        if image_data is not None or video_data is not None:
            raise ValueError("generate: images and videos are not supported. Omit image_data and video_data.")
        prompt_ids = [int(token) for token in prompt_ids]
        self._check_tokens("prompt_ids", prompt_ids)
        trace = current_trace() or CallTrace(noise_key=sample_key(0, 0, request_id, 0))
        run_params = trace.params or self._params
        params = self._override(run_params, sampling_params)
        context = trace.context_of(prompt_ids)
        limit = min(
            trace.remaining_tokens(context, run_params.max_new_tokens),
            params.max_new_tokens,
            self._max_model_len - len(prompt_ids),
        )
        started = time.monotonic()
        if limit <= 0:
            output = Output(finish_reason="length")
        else:
            params = replace(
                params,
                key=trace.next_key(),
                max_new_tokens=limit,
                min_new_tokens=min(limit, params.min_new_tokens),
            )
            request = Request(self._new_id(), prompt_ids, params, trace.group, trace.partial_for(prompt_ids))
            self.generating += 1
            try:
                output = await self._generate(request_id, request, trace)
            finally:
                self.generating -= 1
        end_ids = params.eos_token_ids | params.stop_token_ids
        trace.add(prompt_ids, output, time.monotonic() - started, end_ids, context)
        return _token_output(output)

    def first_outputs(self, traces: Iterable[CallTrace]) -> dict[CallTrace, Output]:
        """Return the last reported partial outputs of trajectories in their first model call.

        A request resumes from them if its replica is lost. Later reports only append tokens, also after a lost replica
        or a weight sync.

        Later model calls are left out: they depend on the state of a loop and its tools, which cannot be restored.
        """
        outputs = {}
        for trace in traces:
            request, replica = self._first_calls.get(trace, (None, None))
            if request is not None and replica is not None:
                output = output_to_resume(request, replica.partials.get(request.id))
                if output.token_ids:
                    outputs[trace] = output
        return outputs

    async def current_first_outputs(self, traces: Iterable[CallTrace]) -> dict[CallTrace, Output]:
        """Read the current partial outputs of trajectories in their first model call, to resume from. Generation
        continues."""
        calls = {trace: self._first_calls[trace] for trace in traces if trace in self._first_calls}
        by_replica: dict[_Replica, dict[str, CallTrace]] = {}
        for trace, (request, replica) in calls.items():
            by_replica.setdefault(replica, {})[request.id] = trace
        fetches = [_fetch_outputs(replica, list(requests)) for replica, requests in by_replica.items()]
        outputs: dict[CallTrace, Output] = {}
        for requests, fetched in zip(by_replica.values(), await asyncio.gather(*fetches), strict=True):
            for request_id, output in fetched.items():
                trace = requests[request_id]
                outputs[trace] = unfinished_part(output, calls[trace][0].params)
        return {trace: output for trace, output in outputs.items() if output.token_ids}

    def reconnect(self, handles: Sequence[RankHandle]) -> None:
        """Reconnect to lost replicas, which were restarted; their requests resume. `handles`: one per replica."""
        self.replicas = [
            replica if replica.lost is None else self._reconnect(replica, handle)
            for replica, handle in zip(self.replicas, handles, strict=True)
        ]
        self._reconnected.set()
        self._reconnected = asyncio.Event()

    def close(self) -> None:
        """Cancel all requests; later requests fail with EngineLostError."""
        self._closed = True
        for replica in self.replicas:
            self._disconnect(replica)
        self._reconnected.set()

    # ---------------------------------------------------------------- requests

    async def _generate(self, request_id: str, request: Request, trace: CallTrace) -> Output:
        """Return the complete output of a request. If its replica is lost, the request resumes on another replica."""
        is_first_call = request.params.key == trace.noise_key
        while True:
            replica = self._choose_replica(request_id, trace.group)
            if is_first_call and trace.prompt_ids in (None, request.prompt_ids):
                self._first_calls[trace] = request, replica
            try:
                return await self._send(replica, request)
            except EngineLostError:
                resume_point = output_to_resume(request, replica.partials.pop(request.id, None))
            finally:
                if is_first_call:
                    self._first_calls.pop(trace, None)
            resume_from = resume_point if resume_point.token_ids else request.resume_from
            if resume_from is not None and is_first_call:
                trace.set_partial(list(request.prompt_ids), resume_from)
            request = replace(request, id=self._new_id(), resume_from=resume_from)
            while all(replica.lost is not None for replica in self.replicas):
                if self._closed:
                    raise EngineLostError("generation has ended")
                await self._reconnected.wait()

    async def _send(self, replica: _Replica, request: Request) -> Output:
        """Send a request to a replica and return its output. Cancelling the awaiting task aborts the request."""
        if replica.lost is not None:
            raise EngineLostError(replica.lost)
        if not replica.waiting:
            replica.last_progress = time.monotonic()
        future = replica.waiting[request.id] = self._loop.create_future()
        replica.unsent.append(request)
        if len(replica.unsent) == 1:
            self._loop.call_soon(_flush, replica)
        try:
            return await future
        except asyncio.CancelledError:
            replica.partials.pop(request.id, None)
            if request in replica.unsent:
                replica.unsent.remove(request)
            else:
                replica.handle.notify("host.abort_requests", [request.id])
            raise
        finally:
            replica.waiting.pop(request.id, None)

    def _choose_replica(self, request_id: str, group: str) -> _Replica:
        """Return the replica of earlier turns. For a first turn, return the least loaded replica, or the replica of its
        group, whose requests share the prompt, if it has at most `_GROUP_EXTRA_LOAD` more requests. Without a group,
        `group` is empty.

        If all replicas are lost, return one of them: sending to it raises EngineLostError.
        """
        replica = self._replica_of_conversation.get(request_id)
        if replica is not None and replica.lost is None:
            self._replica_of_conversation.move_to_end(request_id)
            return replica
        alive = [replica for replica in self.replicas if replica.lost is None] or self.replicas
        order = [alive[(self._next_preferred + step) % len(alive)] for step in range(len(alive))]
        self._next_preferred += 1
        least_loaded = min(order, key=lambda replica: replica.load)
        group_replica = self._replica_of_group.get(group, least_loaded)
        use_group = group_replica.lost is None and group_replica.load <= least_loaded.load + _GROUP_EXTRA_LOAD
        replica = group_replica if use_group else least_loaded
        groups = [(group, self._replica_of_group)] if group else []
        for key, stored in ((request_id, self._replica_of_conversation), *groups):
            stored[key] = replica
            if len(stored) > MAX_STORED_REPLICAS:
                stored.popitem(last=False)
        return replica

    def _new_id(self) -> str:
        return f"{self._client}/{next(self._serial)}"

    def _override(self, run_params: SamplingParams, overrides: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of the run, overridden by those of one call; ValueError for unknown or invalid ones."""
        values = parse_sampling_params("generate", overrides, _IGNORED_PARAMS)
        self._check_tokens("logit_bias", [token for token, _ in values.get("logit_bias", ())])
        return replace(run_params, **values)

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < (self._vocab_size or 2**31):
            raise ValueError(f"generate: {name} has token ids outside of the vocabulary (size {self._vocab_size}).")

    # ---------------------------------------------------------------- replicas

    def _connect(self, handle: RankHandle, client: str) -> _Replica:
        replica = _Replica(handle, client)
        add_peer(replica.describe_stall)
        threading.Thread(target=self._collect_outputs, args=(replica,), name="engine-client", daemon=True).start()
        return replica

    def _reconnect(self, replica: _Replica, handle: RankHandle) -> _Replica:
        """Connect to a restarted replica, under a new client name: late outputs of the old connection are ignored."""
        self._disconnect(replica)
        return self._connect(handle, f"{replica.client}'")

    def _disconnect(self, replica: _Replica) -> None:
        if not replica.closed:
            remove_peer(replica.describe_stall)
        replica.closed = True
        replica.lost = replica.lost or "generation has ended"
        for future in list(replica.waiting.values()):
            future.cancel()

    def _collect_outputs(self, replica: _Replica) -> None:
        """Main function of the thread of a replica: pass collected outputs to the event loop."""
        partials_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            while not replica.closed:
                with_partials = time.monotonic() - partials_at >= PARTIALS_S
                if with_partials:
                    partials_at = time.monotonic()
                try:
                    collected: CollectedOutputs = replica.handle.call(
                        "host.collect_outputs", replica.client, COLLECT_S, with_partials
                    )
                except Exception as error:  # noqa: BLE001 - unfinished requests fail with it
                    self._loop.call_soon_threadsafe(self._mark_lost, replica, f"{type(error).__name__}: {error}")
                    return
                self._loop.call_soon_threadsafe(self.on_outputs, replica, collected)
                if collected.closed:
                    return

    def on_outputs(self, replica: _Replica, collected: CollectedOutputs) -> None:
        """Process one reply of a replica; called in the event loop."""
        if collected.pulses != replica.pulses:
            replica.pulses, replica.last_progress = collected.pulses, time.monotonic()
            pulse()
        replica.stopped_process = collected.stopped_process
        _add_partials(replica, collected.partials)
        for result in collected.outputs:
            self._resolve(replica, result)
        replica.other_requests = max(0, collected.unfinished - len(replica.waiting))
        if collected.closed:
            self._mark_lost(replica, "generation has ended")

    def _resolve(self, replica: _Replica, result: RequestOutput) -> None:
        """Complete the future of a request: with its output, or with a ValueError if it was refused.

        If the engine has failed, the replica is lost.
        """
        future = replica.waiting.pop(result.id, None)
        if result.failed is not None:
            self._mark_lost(replica, result.failed)
        else:
            replica.partials.pop(result.id, None)
        if future is None or future.done():
            return
        if result.output is not None:
            future.set_result(result.output)
        elif result.refused is not None:
            future.set_exception(ValueError(result.refused))
        else:
            future.set_exception(EngineLostError(result.failed))

    def _mark_lost(self, replica: _Replica, reason: str) -> None:
        """Fail the requests of a replica with EngineLostError, by which `_generate` resumes them elsewhere."""
        if replica.lost is not None:
            return
        replica.lost = reason
        for future in replica.waiting.values():
            if not future.done():
                future.set_exception(EngineLostError(reason))
        self._on_lost(reason)


async def _fetch_outputs(replica: _Replica, request_ids: Sequence[str]) -> dict[str, Output]:
    """Return the current outputs of these requests; none if the replica does not respond or is lost, which
    `_collect_outputs` handles."""
    call = asyncio.to_thread(replica.handle.call, "host.current_outputs", request_ids)
    try:
        return await asyncio.wait_for(call, FETCH_S)
    except (WorkerError, asyncio.TimeoutError) as error:  # the built-in TimeoutError only from Python 3.11 on
        logger.warning("partial outputs of %s could not be read: %r", replica.handle, error)
        return {}


def _flush(replica: _Replica) -> None:
    """Send the unsent requests in one call."""
    requests, replica.unsent = replica.unsent, []
    if requests:
        replica.handle.notify("host.submit_requests", replica.client, requests)


def _add_partials(replica: _Replica, partials: Mapping[str, Output]) -> None:
    """Append reported tokens to the partial outputs of unfinished requests."""
    for request_id in partials.keys() & replica.waiting.keys():
        earlier = [replica.partials[request_id]] if request_id in replica.partials else []
        replica.partials[request_id] = join_outputs([*earlier, partials[request_id]])


def _token_output(output: Output) -> TokenOutput:
    reason = "aborted" if output.finish_reason == "abort" else "completed"
    extra = {"versions": list(output.versions), "finish_reason": output.finish_reason}
    return TokenOutput(list(output.token_ids), list(output.log_probs), reason, output.preemptions, extra)
