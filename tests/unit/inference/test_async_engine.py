"""The engine's thread: thousands of awaiting callers, streams, cancelling, standing still, failing and closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace

import pytest

from tests.support.hash_runner import FinishedStep, HashRunner, expected
from tests.support.tiny import tiny_tokenizer
from verl.inference.async_engine import AsyncEngine
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.inference.step_plan import StepPlan
from verl.types.request import Output, Request, SamplingParams

PARAMS = SamplingParams(max_new_tokens=8)
LONG = SamplingParams(max_new_tokens=10_000)


class GatedRunner(HashRunner):
    """Counts the steps on their way; `gate` holds back their results."""

    def __init__(self, *sizes: int, steps_ahead: int) -> None:
        super().__init__(*sizes, steps_ahead=steps_ahead)
        self.on_their_way = 0
        self.gate = threading.Event()
        self.gate.set()

    def launch(self, plan: StepPlan) -> GatedStep:
        self.on_their_way += 1
        return GatedStep(self, super().launch(plan))

    def _feed(self, slot: int, position: int, token: int) -> int:
        # Some tests let a sequence run on: it need not see all that is behind it.
        return position if position > 200 else super()._feed(slot, position, token)


class GatedStep:
    def __init__(self, runner: GatedRunner, done: FinishedStep) -> None:
        self.runner, self.done = runner, done

    def wait(self) -> tuple[list[int], list[float], list[float], list[float]]:
        assert self.runner.gate.wait(timeout=250)
        self.runner.on_their_way -= 1
        return self.done.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[AsyncEngine, GatedRunner]]]:
    started: list[AsyncEngine] = []

    def start_engine(seqs: int = 8, num_blocks: int = 4096, steps_ahead: int = 1) -> tuple[AsyncEngine, GatedRunner]:
        runner = GatedRunner(num_blocks, 16, seqs, 512, steps_ahead=steps_ahead)
        scheduler = Scheduler(BlockManager(num_blocks, 16), seqs, 512, 20_000)
        started.append(AsyncEngine(Engine(scheduler, runner), tiny_tokenizer))
        return started[-1], runner

    yield start_engine
    for engine in started:
        engine.close()


def request(name: str, params: SamplingParams = PARAMS, prompt: list[int] | None = None, **fields) -> Request:
    return Request(name, prompt or [1, 2, 3], params, **fields)


def right(asked: Request, output: Output) -> bool:
    return output == expected(Sequence(asked), output)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def tokens_so_far(engine: AsyncEngine) -> int:
    return max((len(s.output.token_ids) for s in engine.all_unfinished()), default=0)


def test_a_thousand_callers_await_their_answers_at_once(start):
    engine, _ = start(seqs=64)
    asked = [request(f"r{i}", replace(PARAMS, key=i, max_new_tokens=1 + i % 5)) for i in range(1000)]

    async def everyone() -> list[Output]:
        return await asyncio.gather(*(engine.generate(one) for one in asked))

    outputs = asyncio.run(everyone())
    assert all(right(one, output) for one, output in zip(asked, outputs, strict=True))
    assert [len(output.token_ids) for output in outputs] == [1 + i % 5 for i in range(1000)]
    assert engine.all_unfinished() == []


def test_streams_give_the_tokens_as_they_come_and_together_the_answer(start):
    engine, _ = start(seqs=16)
    asked = [request(f"r{i}", replace(PARAMS, key=i, max_new_tokens=20)) for i in range(10)]

    async def read(one: Request) -> list[Output]:
        return [piece async for piece in engine.stream(one)]

    async def everyone() -> list[list[Output]]:
        return await asyncio.gather(*(read(one) for one in asked))

    for one, pieces in zip(asked, asyncio.run(everyone()), strict=True):
        assert [piece.finish_reason for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
        whole = Output(finish_reason="length")
        for piece in pieces:
            for name in ("token_ids", "log_probs", "versions", "raw_log_probs", "sampled_log_probs"):
                getattr(whole, name).extend(getattr(piece, name))
        assert len(whole.token_ids) == 20
        assert right(one, whole)
    assert not engine.streams


def test_a_stream_shows_the_first_tokens_before_the_answer_is_finished(start):
    engine, _ = start()

    async def read_some() -> int:
        count = 0
        stream = engine.stream(request("a", LONG))
        async for piece in stream:
            count += len(piece.token_ids)
            if count >= 5:
                break
        await stream.aclose()
        return count

    assert 5 <= asyncio.run(read_some()) < 10_000
    wait_for(lambda: engine.all_unfinished() == [])
    assert not engine.streams, "closing the stream ended the request"


def test_cancelling_one_awaiting_task_leaves_the_others_alone(start):
    engine, _ = start()
    other = request("other", replace(PARAMS, max_new_tokens=60))

    async def both() -> Output:
        task = asyncio.create_task(engine.generate(request("gone", LONG)))
        while tokens_so_far(engine) < 3:
            await asyncio.sleep(0.001)
        beside = asyncio.create_task(engine.generate(other))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await beside

    assert right(other, asyncio.run(both()))
    wait_for(lambda: engine.all_unfinished() == [])


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_when_halt_returns_no_step_is_on_its_way_and_every_sampled_token_is_there(start, steps_ahead):
    engine, runner = start(steps_ahead=steps_ahead)
    future = engine.submit([request("a", LONG)])[0]
    wait_for(lambda: tokens_so_far(engine) > 5)
    engine.halt("test")
    assert runner.on_their_way == 0
    steps = runner.steps
    assert tokens_so_far(engine) == steps
    assert engine.all_unfinished()[0].in_flight == 0
    time.sleep(0.05)
    assert runner.steps == steps
    engine.halt("another reason")
    engine.resume("test")
    time.sleep(0.05)
    assert runner.steps == steps, "one reason to stand still is left"
    engine.resume("another reason")
    wait_for(lambda: runner.steps > steps)
    engine.abort(["a"])
    assert future.result().finish_reason == "abort"


def test_halt_waits_for_a_step_that_takes_its_time(start):
    engine, runner = start()
    engine.submit([request("a", LONG)])
    wait_for(lambda: tokens_so_far(engine) > 5)
    runner.gate.clear()
    halting = threading.Thread(target=engine.halt, args=("test",))
    halting.start()
    halting.join(timeout=0.1)
    assert halting.is_alive()
    runner.gate.set()
    halting.join(timeout=250)
    assert not halting.is_alive()
    assert runner.on_their_way == 0


def test_new_weights_between_two_steps_take_effect_at_the_next_token(start):
    engine, runner = start()
    asked = [request(f"r{i}", replace(PARAMS, key=i, max_new_tokens=60)) for i in range(6)]
    futures = engine.submit(asked)
    for version in (1, 2):
        wait_for(lambda: tokens_so_far(engine) > 10 * version or not engine.all_unfinished())  # noqa: B023
        engine.halt("update")
        runner.weights = version
        engine.invalidate_kv_cache()
        engine.version = version
        engine.resume("update")
    outputs = [future.result() for future in futures]
    assert all(right(one, output) for one, output in zip(asked, outputs, strict=True))


def test_a_failing_step_fails_the_requests_it_had_and_not_the_next_ones(start):
    engine, runner = start()
    launch = runner.launch

    def broken(plan: StepPlan) -> GatedStep:
        raise RuntimeError("the device is on fire")

    runner.launch = broken
    futures = engine.submit([request("a"), request("b")])
    for future in futures:
        with pytest.raises(RuntimeError, match="on fire"):
            future.result()
    runner.launch = launch
    assert right(request("a"), engine.submit([request("a")])[0].result())


def test_a_stream_of_a_request_that_fails_raises_its_error(start):
    engine, _ = start()

    async def read() -> None:
        async for _ in engine.stream(request("a", LONG)):
            engine.fail(ValueError("told to"))

    with pytest.raises(ValueError, match="told to"):
        asyncio.run(read())


def test_closing_fails_whoever_waits_also_while_halted(start):
    engine, _ = start()
    engine.halt("test")
    future = engine.submit([request("a")])[0]
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        future.result()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([request("b")])


def test_pausing_to_finish_lets_later_ones_wait_and_abort_reaches_those_who_wait(start):
    engine, _ = start(seqs=1)
    earlier = engine.submit([request(f"e{i}") for i in range(3)])
    engine.pause("finish")
    assert wait(earlier, timeout=30).not_done == set()
    later = engine.submit([request("l0"), request("l1")])
    assert wait(later, timeout=0.05).done == set()
    engine.abort(["l0"])
    assert later[0].result() == Output()
    engine.unpause()
    assert right(request("l1"), later[1].result())


def test_a_name_can_be_used_again_by_whoever_got_the_answer(start):
    engine, _ = start()

    async def again_and_again() -> None:
        for _ in range(50):
            await engine.generate(request("same", replace(PARAMS, max_new_tokens=1)))

    asyncio.run(again_and_again())


def test_stop_strings_end_an_answer_and_need_a_tokenizer(start):
    engine, _ = start()
    free = engine.submit([request("a", replace(PARAMS, max_new_tokens=40))])[0].result()
    # Tokens 1 to 4 of the tiny tokenizer are special, and written as they are named.
    end = next(i for i, token in enumerate(free.token_ids) if token == 3)
    stop = replace(PARAMS, max_new_tokens=40, stop=("<|user|>",))
    stopped = engine.submit([request("b", stop)])[0].result()
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: end + 1], "stop")
    bare = AsyncEngine(engine.engine)
    with pytest.raises(ValueError, match=r"'c': stop=\['<\|user\|>'\].*stop_token_ids"):
        bare.submit([request("c", stop)])


def test_callers_in_many_threads_with_aborts_and_updates_all_get_right_answers(start):
    engine, runner = start(seqs=6, num_blocks=4096)
    answers: list[tuple[Request, Output]] = []

    def ask(caller: int) -> None:
        for turn in range(12):
            params = replace(PARAMS, key=caller * 100 + turn, max_new_tokens=1 + turn % 9)
            asked = [request(f"{caller}-{turn}-{i}", params, [turn % 3] * (1 + i), group=str(turn)) for i in range(3)]
            futures = engine.submit(asked)
            if turn % 4 == caller:
                engine.abort([asked[1].id])
            if turn % 5 == caller:
                futures[2].cancel()
            answers.extend((one, f.result()) for one, f in zip(asked, futures, strict=True) if not f.cancelled())

    callers = [threading.Thread(target=ask, args=(caller,)) for caller in range(3)]
    for caller in callers:
        caller.start()
    while any(caller.is_alive() for caller in callers):
        engine.halt("update")
        runner.weights += 1
        engine.version = runner.weights
        engine.invalidate_kv_cache()
        engine.resume("update")
        time.sleep(0.002)
    assert len(answers) >= 3 * 12 * 2
    assert all(right(one, output) for one, output in answers)
    assert engine.all_unfinished() == []
