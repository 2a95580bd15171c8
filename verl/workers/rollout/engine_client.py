"""EngineClient: generates with the engine replicas of a run, for agent loops and the gateway.

Turns of one `request_id` stay on one replica, whose prefix cache has their context; a first turn goes to the replica
with the fewest requests, or to that of its group if it has hardly more. A request whose replica is lost resumes on
another one from the tokens that were reported. Requests created in one iteration of the event loop are sent together,
and outputs arrive by one open call per replica: no RPC per token or per request.
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
from dataclasses import dataclass, field, fields, replace
from typing import Any

from verl.single_controller.base.errors import WorkerError
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output, Request, SamplingParams, TokenOutput
from verl.utils.counter_noise import sample_keys
from verl.utils.helper_processes import Standing, add_peer, remove_peer
from verl.utils.progress import pulse
from verl.workers.rollout.call_record import Record, current
from verl.workers.rollout.engine_host import CollectedOutputs, RequestOutput
from verl.workers.rollout.errors import EngineLostError
from verl.workers.rollout.partial_outputs import join_outputs, resumable, unfinished_part

__all__ = ["EngineClient"]

logger = logging.getLogger(__name__)

_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# Accepted without effect: the engine always reports log-probs, and generates one answer.
_IGNORED = frozenset({"logprobs", "n", "skip_special_tokens", "detokenize"})
_SETTABLE = {field.name for field in fields(SamplingParams)} - {"key"}
# A call for outputs blocks this long. Shorter than what hang detection calls long: each one shows progress.
_COLLECT_S = 2.0
# A replica without progress for this long is named if the run hangs.
_SILENT_S = 10.0
# A replica that does not return its current outputs within this time is left out of a checkpoint.
_FETCH_S = 10.0
# Interval in which replicas report partial outputs.
_PARTIALS_S = 2.0
# A replica with this many requests more than the least loaded one is still used for a group whose prompt it has.
_NEARLY = 8
# Number of conversations, and of groups, whose replica is remembered.
_REMEMBERED = 16_384


@dataclass(slots=True, eq=False)
class _Replica:
    """State of the connection to one replica."""

    handle: RankHandle
    client: str
    """Name under which outputs are collected."""
    waiting: dict[str, asyncio.Future[Output]] = field(default_factory=dict)
    unsent: list[Request] = field(default_factory=list)
    partials: dict[str, Output] = field(default_factory=dict)
    others: int = 0
    """Requests of other clients."""
    pulses: int = 0
    last_progress: float = field(default_factory=time.monotonic)
    stopped_process: Standing | None = None
    closed: bool = False
    lost: str | None = None
    """Why it cannot generate any more."""

    @property
    def load(self) -> int:
        return self.others + len(self.waiting)

    def silence(self) -> str | None:
        """For hang detection, from any thread: a description if requests wait and the engine makes no progress."""
        seconds = time.monotonic() - self.last_progress
        if not self.waiting or seconds < _SILENT_S:
            return None
        engine = ""
        if self.stopped_process is not None:
            engine = "; its engine's process (pid {}) is {}".format(*self.stopped_process)
        return f"{self.handle}, whose engine has not moved for {seconds:.0f} s ({len(self.waiting)} requests{engine})"


class EngineClient:
    """For the trajectories of one process; all methods but the constructor are for the event loop's thread."""

    def __init__(
        self,
        handles: Sequence[RankHandle],
        params: SamplingParams,
        max_model_len: int,
        client: str,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[str], None],
        first: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        """`params` apply where neither the loop nor its job says otherwise. `client` must be unique among clients.
        `on_lost(reason)` is called when a replica is lost: its requests resume on others, or wait for `renew`.
        `first`: where to start among equally loaded replicas. `vocabulary`: size; larger token ids are rejected.
        """
        self._params, self._max_model_len, self._client = params, max_model_len, client
        self._loop, self._on_lost, self._vocabulary = loop, on_lost, vocabulary
        self._home: OrderedDict[str, _Replica] = OrderedDict()
        self._group_home: OrderedDict[str, _Replica] = OrderedDict()
        self._serial = itertools.count()
        self._turn = first
        self._renewed = asyncio.Event()
        self._closed = False
        self._first_calls: dict[Record, tuple[Request, _Replica]] = {}
        self.generating = 0
        """Number of requests that are waited for."""
        self._replicas = [self._connect(handle, client) for handle in handles]

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """Generate a continuation of `prompt_ids`.

        `sampling_params` has the names of `SamplingParams`. The answer is limited to what is left of
        `rollout.max_new_tokens` since the context began, and of `max_model_len`; if nothing is left, it is empty with
        finish reason `length`.
        """
        if image_data is not None or video_data is not None:
            raise ValueError("generate: images and videos are not for this engine. Leave them out.")
        prompt_ids = [int(token) for token in prompt_ids]
        self._check_tokens("prompt_ids", prompt_ids)
        record = current() or Record(key=sample_keys(0, 0, request_id, 0))
        run_params = record.params or self._params
        params = self._merged(run_params, sampling_params)
        room = self._max_model_len - len(prompt_ids)
        context = record.context_of(prompt_ids)
        left = min(record.left(context, run_params.max_new_tokens), params.max_new_tokens, room)
        started = time.monotonic()
        if left <= 0:
            output = Output(finish_reason="length")
        else:
            params = replace(
                params,
                key=record.next_key(),
                max_new_tokens=left,
                min_new_tokens=min(left, params.min_new_tokens),
            )
            request = Request(self._new_id(), prompt_ids, params, record.group, record.resumed(prompt_ids))
            self.generating += 1
            try:
                output = await self._output(request_id, request, record)
            finally:
                self.generating -= 1
        end_ids = params.eos_token_ids | params.stop_token_ids
        record.add(prompt_ids, output, time.monotonic() - started, end_ids, context)
        return _token_output(output)

    def first_outputs(self, records: Iterable[Record]) -> dict[Record, Output]:
        """Partial outputs of trajectories in their first model call, as last reported: what a request resumes from if
        its replica is lost. Later reports only append to them, also after a loss and a weight sync.

        Later calls depend on the state of a loop and its tools, which cannot be restored.
        """
        outputs = {}
        for record in records:
            request, replica = self._first_calls.get(record, (None, None))
            if request is not None and replica is not None:
                output = _resume_point(request, replica.partials.get(request.id))
                if output.token_ids:
                    outputs[record] = output
        return outputs

    async def current_first_outputs(self, records: Iterable[Record]) -> dict[Record, Output]:
        """Current partial outputs of trajectories in their first model call, to resume from. Generation goes on."""
        calls = {record: self._first_calls[record] for record in records if record in self._first_calls}
        by_replica: dict[_Replica, dict[str, Record]] = {}
        for record, (request, replica) in calls.items():
            by_replica.setdefault(replica, {})[request.id] = record
        fetches = [_fetch_outputs(replica, list(requests)) for replica, requests in by_replica.items()]
        outputs: dict[Record, Output] = {}
        for requests, fetched in zip(by_replica.values(), await asyncio.gather(*fetches), strict=True):
            for name, output in fetched.items():
                record = requests[name]
                outputs[record] = unfinished_part(output, calls[record][0].params)
        return {record: output for record, output in outputs.items() if output.token_ids}

    def renew(self, handles: Sequence[RankHandle]) -> None:
        """Reconnect to replicas that were restarted, at these handles (one per replica); waiting requests resume."""
        pairs = zip(self._replicas, handles, strict=True)
        self._replicas = [replica if replica.lost is None else self._successor(replica, h) for replica, h in pairs]
        self._renewed.set()
        self._renewed = asyncio.Event()

    def close(self) -> None:
        """Cancel all requests; later ones fail with EngineLostError."""
        self._closed = True
        for replica in self._replicas:
            self._disconnect(replica)
        self._renewed.set()

    # ---------------------------------------------------------------- requests

    async def _output(self, request_id: str, request: Request, record: Record) -> Output:
        """The whole output, however often its replica is lost."""
        is_first = request.params.key == record.key
        while True:
            replica = self._choose(request_id, record.group)
            if is_first and record.prompt_ids in (None, request.prompt_ids):
                self._first_calls[record] = request, replica
            try:
                return await self._send(replica, request)
            except EngineLostError:
                known = _resume_point(request, replica.partials.pop(request.id, None))
            finally:
                if is_first:
                    self._first_calls.pop(record, None)
            so_far = known if known.token_ids else request.resume_from
            if so_far is not None and is_first:
                record.note(list(request.prompt_ids), so_far)
            request = replace(request, id=self._new_id(), resume_from=so_far)
            while all(each.lost is not None for each in self._replicas):
                if self._closed:
                    raise EngineLostError("generation has ended")
                await self._renewed.wait()

    async def _send(self, replica: _Replica, request: Request) -> Output:
        """The output of one replica. Cancelling the awaiting task aborts the request."""
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
                replica.handle.tell("host.abort_requests", [request.id])
            raise
        finally:
            replica.waiting.pop(request.id, None)

    def _choose(self, request_id: str, group: str) -> _Replica:
        """The replica of earlier turns; for a first turn the least loaded one, or that of its group if it has hardly
        more requests: answers of a group share their prompt."""
        home = self._home.get(request_id)
        if home is not None and home.lost is None:
            self._home.move_to_end(request_id)
            return home
        living = [replica for replica in self._replicas if replica.lost is None] or self._replicas
        order = [living[(self._turn + step) % len(living)] for step in range(len(living))]
        self._turn += 1
        least = min(order, key=lambda replica: replica.load)
        neighbour = self._group_home.get(group, least)
        near = neighbour.lost is None and neighbour.load <= least.load + _NEARLY
        home = self._home[request_id] = self._group_home[group] = neighbour if near else least
        for homes in (self._home, self._group_home):
            if len(homes) > _REMEMBERED:
                homes.popitem(last=False)
        return home

    def _new_id(self) -> str:
        return f"{self._client}/{next(self._serial)}"

    def _merged(self, run_params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
        values: dict[str, Any] = {}
        for name, value in given.items():
            known = _ALIASES.get(name, name)
            if known in _SETTABLE:
                values[known] = _CONVERTED.get(known, lambda same: same)(value)
            elif known not in _IGNORED:
                raise ValueError(f"generate: no sampling parameter {name!r}. There are {sorted(_SETTABLE)}.")
        self._check_tokens("logit_bias", [token for token, _ in values.get("logit_bias", ())])
        return replace(run_params, **values)

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < (self._vocabulary or 2**31):
            raise ValueError(f"generate: {name} has tokens beyond the {self._vocabulary} that the model has.")

    # ---------------------------------------------------------------- replicas

    def _connect(self, handle: RankHandle, client: str) -> _Replica:
        replica = _Replica(handle, client)
        add_peer(replica.silence)
        threading.Thread(target=self._collect_outputs, args=(replica,), name="engine-client", daemon=True).start()
        return replica

    def _successor(self, replica: _Replica, handle: RankHandle) -> _Replica:
        """A connection to the restarted replica, under a new client name: late outputs of the old one are ignored."""
        self._disconnect(replica)
        return self._connect(handle, f"{replica.client}'")

    def _disconnect(self, replica: _Replica) -> None:
        if not replica.closed:
            remove_peer(replica.silence)
        replica.closed = True
        replica.lost = replica.lost or "generation has ended"
        for future in list(replica.waiting.values()):
            future.cancel()

    def _collect_outputs(self, replica: _Replica) -> None:
        """Thread of one replica."""
        reported = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            while not replica.closed:
                with_partials = time.monotonic() - reported >= _PARTIALS_S
                if with_partials:
                    reported = time.monotonic()
                try:
                    collected: CollectedOutputs = replica.handle.ask(
                        "host.collect_outputs", replica.client, _COLLECT_S, with_partials
                    )
                except Exception as error:  # noqa: BLE001 - waiting requests get it
                    self._loop.call_soon_threadsafe(self._lose, replica, f"{type(error).__name__}: {error}")
                    return
                self._loop.call_soon_threadsafe(self._deliver, replica, collected)
                if collected.closed:
                    return

    def _deliver(self, replica: _Replica, collected: CollectedOutputs) -> None:
        if collected.pulses != replica.pulses:
            replica.pulses, replica.last_progress = collected.pulses, time.monotonic()
            pulse()
        replica.stopped_process = collected.stopped_process
        _add_partials(replica, collected.partials)
        for output in collected.outputs:
            self._resolve(replica, output)
        replica.others = max(0, collected.unfinished - len(replica.waiting))
        if collected.closed:
            self._lose(replica, "the generation was ended")

    def _resolve(self, replica: _Replica, received: RequestOutput) -> None:
        future = replica.waiting.pop(received.id, None)
        if received.failed is not None:
            self._lose(replica, received.failed)
        else:
            replica.partials.pop(received.id, None)
        if future is None or future.done():
            return
        if received.output is not None:
            future.set_result(received.output)
        elif received.refused is not None:
            future.set_exception(ValueError(received.refused))
        else:
            future.set_exception(EngineLostError(received.failed))

    def _lose(self, replica: _Replica, why: str) -> None:
        if replica.lost is not None:
            return
        replica.lost = why
        for future in replica.waiting.values():
            if not future.done():
                future.set_exception(EngineLostError(why))
        self._on_lost(why)


async def _fetch_outputs(replica: _Replica, request_ids: Sequence[str]) -> dict[str, Output]:
    """Whole outputs so far; none of a replica that is lost, which `_collect_outputs` handles, or does not respond."""
    call = asyncio.to_thread(replica.handle.ask, "host.current_outputs", request_ids)
    try:
        return await asyncio.wait_for(call, _FETCH_S)
    except (WorkerError, asyncio.TimeoutError) as error:  # not TimeoutError before Python 3.11
        logger.warning("partial outputs of %s could not be read: %r", replica.handle, error)
        return {}


def _resume_point(request: Request, reported: Output | None) -> Output:
    """The tokens that a lost request resumes from: those it was resumed from before, then the reported ones without
    the last, which may have been the end of the answer."""
    return join_outputs(request.resume_from, resumable(reported or Output()), len(request.prompt_ids))


def _flush(replica: _Replica) -> None:
    requests, replica.unsent = replica.unsent, []
    if requests:
        replica.handle.tell("host.submit_requests", replica.client, requests)


def _add_partials(replica: _Replica, partials: Mapping[str, Output]) -> None:
    for name in partials.keys() & replica.waiting.keys():
        replica.partials[name] = join_outputs(replica.partials.get(name), partials[name])


def _token_output(output: Output) -> TokenOutput:
    reason = "aborted" if output.finish_reason == "abort" else "completed"
    extra = {"versions": list(output.versions), "finish_reason": output.finish_reason}
    return TokenOutput(list(output.token_ids), list(output.log_probs), reason, output.preemptions, extra)


def _token_set(value: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or ())


def _texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _biases(value: Mapping[Any, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    return tuple((int(token), float(bias)) for token, bias in pairs)


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "eos_token_ids": _token_set,
    "stop_token_ids": _token_set,
    "stop": _texts,
    "logit_bias": _biases,
}
