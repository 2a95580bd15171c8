"""EngineClient: routing, resumption after the loss of a replica, partial outputs, and the report of silent engines."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine_clients import HostHandle, RequestEngine, ScriptedRollout, engine_client
from tests.support.script_runner import scripted_engine
from verl.single_controller.base.heartbeat import ComputeTracker
from verl.single_controller.base.worker_group import RankHandle
from verl.types.request import EngineLostError, Output, Request, SamplingParams
from verl.utils.progress import silent_peer
from verl.workers.rollout import engine_client as module
from verl.workers.rollout.call_trace import CallTrace, tracing
from verl.workers.rollout.engine_client import EngineClient
from verl.workers.rollout.engine_host import CollectedOutputs

PARAMS = SamplingParams(max_new_tokens=8)
ONE = Output([7], [-0.1], [0], finish_reason="stop")


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLLECT_S", 0.005)
    monkeypatch.setattr(module, "PARTIALS_S", 0.0)


def tokens(*ids: int) -> Output:
    return Output(list(ids), [-0.1] * len(ids), [0] * len(ids))


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def generate(client: EngineClient, name: str, group: str = "p", prompt: int = 1) -> list[int]:
    with tracing(CallTrace(group=group)):
        return (await client.generate(name, prompt_ids=[prompt, 2], sampling_params={})).token_ids


# ---------------------------------------------------------------- routing


class Loaded:
    """Engines that finish requests of this client immediately; requests of other clients do not finish."""

    def __init__(self, count: int) -> None:
        self.engines = [RequestEngine(self.output) for _ in range(count)]
        self.handles = [HostHandle(engine, rank) for rank, engine in enumerate(self.engines)]

    @staticmethod
    def output(request: Request) -> Output | None:
        return None if request.id.startswith("other") else ONE

    async def load(self, client: EngineClient, *loads: int) -> None:
        """Report these numbers of requests of other clients to the client."""
        for engine, handle, load in zip(self.engines, self.handles, loads, strict=True):
            have = len(engine.unfinished)
            added = [Request(f"other-{number}", [1], PARAMS) for number in range(have, load)]
            handle.host.submit_requests("other", added)
            handle.host.abort_requests([f"other-{number}" for number in range(load, have)])
        await until(lambda: [replica.load for replica in client.replicas] == list(loads))

    @property
    def counts(self) -> list[int]:
        return [sum(request.id.startswith("test") for request in engine.requests) for engine in self.engines]


def test_a_first_turn_goes_to_the_least_loaded_replica_and_later_turns_stay_there():
    three = Loaded(3)

    async def check() -> None:
        async with engine_client(*three.handles, params=PARAMS) as client:
            await three.load(client, 30, 20, 31)
            await generate(client, "a")
            await three.load(client, 30, 200, 31)
            await generate(client, "a")
            assert three.counts == [0, 2, 0], "the replica has its prefix"
            await generate(client, "b")
            assert three.counts == [1, 2, 0], "the replica of its group has far more requests"
            await three.load(client, 35, 200, 31)
            await generate(client, "c")
            assert three.counts == [2, 2, 0], "the replica of its group has hardly more requests"
            three.handles[1].die()
            await until(lambda: client.replicas[1].lost)
            await generate(client, "a", group="q")
            assert three.counts == [2, 2, 1]

    asyncio.run(check())


def test_conversations_outside_of_trajectories_are_no_group():
    two = Loaded(2)

    async def check() -> None:
        async with engine_client(*two.handles, params=PARAMS) as client:
            for number in range(4):
                await client.generate(f"c{number}", prompt_ids=[1, 2], sampling_params={})

    asyncio.run(check())
    assert two.counts == [2, 2]


class Name(str):
    """A name with weak references."""


def test_finished_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_STORED_REPLICAS", 4)
    names, groups = ([Name(f"{kind}{number}") for number in range(100)] for kind in "ng")
    alive = [weakref.ref(name) for name in (*names, *groups)]

    async def check() -> int:
        engine = RequestEngine(lambda request: ONE)
        async with engine_client(engine, params=PARAMS) as client:
            for _ in range(100):
                await generate(client, names.pop(), groups.pop())
            engine.requests.clear()
            gc.collect()
            return sum(reference() is not None for reference in alive)

    assert asyncio.run(check()) == 2 * 4


def test_requests_of_one_iteration_are_sent_together_in_order():
    engine = RequestEngine(lambda request: ONE)
    sent: list[int] = []

    class Counting(HostHandle):
        def notify(self, method: str, *args: Any) -> None:
            if method == "host.submit_requests":
                sent.append(len(args[1]))
            super().notify(method, *args)

    async def check() -> None:
        async with engine_client(Counting(engine), params=PARAMS) as client:
            await asyncio.gather(*(generate(client, f"c{number}", prompt=number) for number in range(32)))

    asyncio.run(check())
    assert sent == [32]
    assert [request.prompt_ids[0] for request in engine.requests] == list(range(32))


def test_an_invalid_request_fails_alone():
    def answer(request: Request) -> Output:
        if request.prompt_ids[0] == 3:
            raise ValueError("prompts with 3 are not supported")
        return ONE

    async def check() -> list[Any]:
        async with engine_client(RequestEngine(answer), params=PARAMS) as client:
            calls = (generate(client, f"c{number}", prompt=number) for number in range(5))
            return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(check())
    assert [results[number] for number in (0, 1, 2, 4)] == [[7]] * 4
    assert isinstance(results[3], ValueError)
    assert "prompts with 3 are not supported" in str(results[3])


# ---------------------------------------------------------------- partial outputs and losses


class Gated:
    """A real scheduler and engine whose model counts upwards; it generates `steps` tokens, then blocks."""

    def __init__(self, steps: int = 10**6) -> None:
        self.steps, self.opened = steps, threading.Event()
        self.engine = scripted_engine(self.next_token)
        self.handle = HostHandle(ScriptedRollout(self.engine))

    def next_token(self, seen: Any) -> int:
        self.steps -= 1
        if self.steps < 0:
            self.opened.wait(30)
        return int(seen[-1]) + 1

    def close(self) -> None:
        self.opened.set()
        self.engine.close()


@pytest.fixture
def gates() -> Any:
    engines: list[Gated] = []

    def make(*steps: int) -> list[Gated]:
        engines.extend(Gated(count) for count in steps)
        return engines

    yield make
    for gated in engines:
        gated.close()


def first_record(**known: Any) -> CallTrace:
    return CallTrace(noise_key=5, group="p", prompt_ids=[10], **known)


def start(client: EngineClient, trace: CallTrace, prompt: list[int], count: int = 40) -> asyncio.Task[Any]:
    with tracing(trace):
        call = client.generate("c", prompt_ids=prompt, sampling_params={"max_new_tokens": count})
        return asyncio.create_task(call)


WHOLE = list(range(11, 51))
LONG = SamplingParams(max_new_tokens=64)


def test_partial_outputs_are_read_without_interrupting_the_request(gates: Any):
    (gated,) = gates(12)

    async def check() -> None:
        async with engine_client(gated.handle, params=LONG) as client:
            trace = first_record()
            running = start(client, trace, [10])
            await until(lambda: client.first_outputs([trace]) and gated.steps < 0)
            current = (await client.current_first_outputs([trace]))[trace].token_ids
            assert current == WHOLE[: len(current)]
            assert 10 <= len(current) <= 12
            await until(lambda: len(client.first_outputs([trace])[trace].token_ids) >= len(current) - 1)
            gated.opened.set()
            assert (await running).token_ids == WHOLE
            assert client.first_outputs([trace]) == await client.current_first_outputs([trace]) == {}

    asyncio.run(check())
    assert gated.engine.unfinished == 0


def test_a_lost_request_resumes_on_another_replica_from_the_reported_tokens(gates: Any):
    first, second = gates(12, 10**6)
    lost: list[str] = []
    resumed: list[Request] = []
    submit = second.handle.host.rollout.submit
    second.handle.host.rollout.submit = lambda requests: (resumed.extend(requests), submit(requests))[1]

    async def check() -> None:
        async with engine_client(first.handle, second.handle, params=LONG, on_lost=lost.append) as client:
            trace = first_record()
            running = start(client, trace, [10])
            await until(lambda: len(client.first_outputs([trace]).get(trace, Output()).token_ids) >= 5)
            reported = client.first_outputs([trace])[trace].token_ids
            first.handle.dead = True
            assert (await running).token_ids == WHOLE
            assert resumed[0].resume_from is not None
            known = resumed[0].resume_from.token_ids
            assert known == WHOLE[: len(known)]
            assert len(known) >= len(reported), "what was reported is never sampled again"

    asyncio.run(check())
    assert len(lost) == 1
    assert "worker process died" in lost[0]


def test_a_loss_without_reported_tokens_keeps_what_the_request_was_resumed_from():
    """Also after several losses before its first token."""
    engines = [RequestEngine(lambda request: None) for _ in range(4)]
    handles = [HostHandle(engine) for engine in engines]

    async def check() -> None:
        async with engine_client(handles[0], params=PARAMS) as client:
            trace = first_record()
            trace.set_partial([10], tokens(11, 12, 13))
            running = start(client, trace, [10])
            for before, after, engine in zip(handles, handles[1:], engines, strict=False):
                await until(lambda engine=engine: engine.requests)
                before.die()
                await until(lambda: client.replicas[0].lost)
                client.reconnect([after])
            await until(lambda: engines[3].requests)
            engines[3].finish(engines[3].requests[0].id, tokens(11, 12, 13, 14))
            assert (await running).token_ids == [11, 12, 13, 14]

    asyncio.run(check())
    assert [engine.requests[0].resume_from.token_ids for engine in engines] == [[11, 12, 13]] * 4


def test_reported_partial_outputs_are_what_a_lost_request_resumes_from():
    """The last token is sampled again, possibly with other weights: it is not reported before."""
    first, second = RequestEngine(lambda request: None), RequestEngine(lambda request: None)
    handles = [HostHandle(first), HostHandle(second)]

    async def check() -> list[list[int]]:
        async with engine_client(*handles, params=PARAMS) as client:
            trace, reports = first_record(), []
            running = start(client, trace, [10])
            await until(lambda: first.requests)
            first.partials[first.requests[0].id] = tokens(11, 12, 13)
            await until(lambda: client.first_outputs([trace]))
            reports.append(client.first_outputs([trace])[trace].token_ids)
            handles[0].dead = True
            await until(lambda: second.requests)
            second.partials[second.requests[0].id] = tokens(11, 12, 93, 94)
            await until(lambda: len(client.first_outputs([trace])[trace].token_ids) > 2)
            reports.append(client.first_outputs([trace])[trace].token_ids)
            second.finish(second.requests[0].id, tokens(11, 12, 93, 94, 95))
            assert (await running).token_ids == [11, 12, 93, 94, 95]
            return reports

    assert asyncio.run(check()) == [[11, 12], [11, 12, 93]]


def test_requests_without_any_replica_wait_for_reconnect_and_late_outputs_are_ignored():
    old, new = RequestEngine(lambda request: None), RequestEngine(lambda request: None)
    lost: list[str] = []

    async def check() -> list[int]:
        handle = HostHandle(old)
        async with engine_client(handle, params=PARAMS, on_lost=lost.append) as client:
            running = asyncio.create_task(generate(client, "a"))
            await until(lambda: old.requests)
            previous = client.replicas[0]
            handle.dead = True
            await until(lambda: lost)
            late = asyncio.create_task(generate(client, "b"))  # while no replica is left
            await asyncio.sleep(0.02)
            assert [running.done(), late.done()] == [False, False]
            client.reconnect([HostHandle(new)])
            await until(lambda: len(new.requests) == 2)
            # The restarted rank delivers a late output, under the old request id.
            client.on_outputs(previous, _collected(old.requests[0].id, tokens(66)))
            client.on_outputs(client.replicas[0], _collected(old.requests[0].id, tokens(66)))
            assert client.replicas[0].client != previous.client
            for request in new.requests:
                new.finish(request.id, tokens(21, 22))
            assert await late == [21, 22]
            return await running

    assert asyncio.run(check()) == [21, 22]
    assert len(lost) == 1


def _collected(request_id: str, output: Output) -> CollectedOutputs:
    return CollectedOutputs([module.RequestOutput(request_id, output)], 0, 0, False)


def test_a_second_call_with_the_same_prompt_is_another_sample():
    """Only the first call has a partial output and resumes from it, also if a later call is lost."""
    engine = RequestEngine(lambda request: None)
    other = RequestEngine(lambda request: None)

    async def check() -> None:
        async with engine_client(HostHandle(engine), HostHandle(other), params=PARAMS) as client:
            trace = first_record()
            trace.set_partial([10], tokens(9, 9))
            first = start(client, trace, [10])
            await until(lambda: engine.requests)
            with tracing(trace):
                call = client.generate("another", prompt_ids=[10], sampling_params={})
                second = asyncio.create_task(call)
            await until(lambda: len(engine.requests) + len(other.requests) == 2)
            requests = [*engine.requests, *other.requests]
            assert len({request.params.key for request in requests}) == 2
            assert [request.resume_from and request.resume_from.token_ids for request in requests] == [[9, 9], None]
            assert client.first_outputs([trace])[trace].token_ids == [9, 9]
            second.cancel()
            await asyncio.wait([second])
            assert client.first_outputs([trace])[trace].token_ids == [9, 9]
            engine.finish(requests[0].id, tokens(9, 9, 4))
            assert (await first).token_ids == [9, 9, 4]

    asyncio.run(check())


def test_a_cancelled_task_aborts_its_request(gates: Any):
    (gated,) = gates(5)

    async def check() -> None:
        async with engine_client(gated.handle, params=LONG) as client:
            running = start(client, first_record(), [10])
            await until(lambda: gated.steps < 0)
            running.cancel()
            await asyncio.wait([running])
            gated.opened.set()
            await until(lambda: not gated.engine.unfinished)
            assert client.generating == 0

    asyncio.run(check())


def test_requests_after_close_fail_also_those_that_wait_for_reconnect():
    async def check() -> list[Any]:
        lost: list[str] = []
        handle = HostHandle(RequestEngine(lambda request: None))
        async with engine_client(handle, params=PARAMS, on_lost=lost.append) as client:
            waiting = asyncio.create_task(generate(client, "a"))
            await until(lambda: client.replicas[0].waiting)
            handle.dead = True
            await until(lambda: lost)
            await asyncio.sleep(0)
        late = asyncio.create_task(generate(client, "b"))
        _, pending = await asyncio.wait([waiting, late], timeout=10)
        assert not pending
        return [task.exception() for task in (waiting, late)]

    assert [type(error) for error in asyncio.run(check())] == [EngineLostError] * 2


def test_a_replica_that_does_not_respond_is_left_out_of_current_outputs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FETCH_S", 0.05)
    released = threading.Event()

    class Blocked(HostHandle):
        def call(self, method: str, *args: Any) -> Any:
            if method == "host.current_outputs":
                released.wait(30)
            return super().call(method, *args)

    engine = RequestEngine(lambda request: None)

    async def check() -> None:
        async with engine_client(Blocked(engine), params=PARAMS) as client:
            trace = first_record()
            running = start(client, trace, [10])
            await until(lambda: engine.requests)
            assert await client.current_first_outputs([trace]) == {}
            released.set()
            engine.finish(engine.requests[0].id, tokens(11))
            assert (await running).token_ids == [11]

    asyncio.run(check())


# ---------------------------------------------------------------- hang detection


class Stuck(RankHandle):
    """A rank that replies, but whose engine makes no progress."""

    role, rank = "rollout", 3

    def notify(self, method: str, *args: Any) -> None: ...

    def call(self, method: str, *args: Any) -> CollectedOutputs:
        time.sleep(0.05)
        return CollectedOutputs([], 1, 7, False, (4799, "stopped"))

    def call_rows(self, method: str, *args: Any) -> Any:
        raise NotImplementedError


def test_an_engine_without_progress_is_named_to_hang_detection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STALLED_S", 0.3)
    tracker = ComputeTracker()

    async def check() -> list[str | None]:
        async with engine_client(Stuck(), params=PARAMS) as client:
            reports = [silent_peer()]
            waiting = asyncio.create_task(generate(client, "a"))
            await until(lambda: client.replicas[0].waiting and client.replicas[0].stopped_process)
            reports.append(silent_peer())
            await until(silent_peer)
            with tracker.running("generate_sequences", lambda: 0):
                reports.append(tracker.heartbeat(all_threads=False).silent_peer)
        await asyncio.wait([waiting])
        return [*reports, silent_peer()]

    before, soon, late, after = asyncio.run(check())
    assert (before, soon, after) == (None, None, None)
    stall = r"rank 3 of rollout, whose engine made no progress for \d+ s \(1 requests; its engine's process \(pid 4799"
    assert re.match(stall, late or "")
