"""Which replica a turn goes to, and that a stream, which lives as long as the run, does not remember all of them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass, field

import pytest
from verl.agent.server_manager import ServerManager

from verl.agent import server_manager
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.call_record import Record, recording


@dataclass
class Answers:
    """A replica that answers at once."""

    load: int = 0
    lost: bool = False
    asked: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> Output:
        self.asked.append(request.id)
        return Output([7], [-0.1], [0], finish_reason="stop")


class Name(str):
    """Of a conversation; a plain one cannot be watched."""


def ask(manager: ServerManager, name: str, group: str = "p") -> None:
    async def asking() -> None:
        with recording(Record(group=group)):
            await manager.generate(name, prompt_ids=[1, 2], sampling_params={})

    asyncio.run(asking())


def counts(replicas: list[Answers]) -> list[int]:
    return [len(each.asked) for each in replicas]


def test_a_first_turn_goes_where_the_least_is_to_do_and_later_ones_stay_there():
    replicas = [Answers(load=30), Answers(load=20), Answers(load=31)]
    manager = ServerManager(replicas, SamplingParams(max_new_tokens=8), 64, "test")
    ask(manager, "a")
    replicas[1].load = 200
    ask(manager, "a")
    assert counts(replicas) == [0, 2, 0], "its prefix is there"
    ask(manager, "b")
    assert counts(replicas) == [1, 2, 0], "of the same prompt, but far more is to do there"
    replicas[0].load = 35
    ask(manager, "c")
    assert counts(replicas) == [2, 2, 0], "nearly the least, and it has the prompt"
    replicas[1].lost = True
    ask(manager, "a", group="q")
    assert counts(replicas) == [2, 2, 1]


def test_conversations_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_manager, "_REMEMBERED", 4)
    manager = ServerManager([Answers(), Answers()], SamplingParams(max_new_tokens=8), 64, "test")
    names, groups = ([Name(f"{kind}{number}") for number in range(100)] for kind in "ng")
    alive = [weakref.ref(name) for name in (*names, *groups)]
    for _ in range(100):
        ask(manager, names.pop(), groups.pop())
    gc.collect()
    assert sum(each() is not None for each in alive) == 2 * 4


@dataclass
class Stalling(Answers):
    """A replica that ends requests only after `stalls` seconds, in the order in which it was told to, with what there
    is: a token for each time that they were asked."""

    stalls: float = 0.0
    waiting: dict[str, tuple[Request, asyncio.Future[Output]]] = field(default_factory=dict)

    async def answer(self, request: Request) -> Output:
        self.asked.append(request.id)
        future = asyncio.get_running_loop().create_future()
        self.waiting[request.id] = request, future
        return await future

    def abort(self, ids: list[str]) -> None:
        for name in ids:
            asyncio.get_running_loop().call_later(self.stalls, self.end, name, "abort")

    def end(self, name: str, reason: str) -> None:
        request, future = self.waiting[name]
        if not future.done():
            said = [7] * (1 + len(request.resume_from.token_ids if request.resume_from else []))
            future.set_result(Output(said, [-0.1] * len(said), [0] * len(said), finish_reason=reason))


def test_answers_that_are_noted_go_on_also_if_the_engine_takes_long_to_say_what_there_is(monkeypatch):
    monkeypatch.setattr(server_manager, "_NOTING_S", 0.05)
    replica = Stalling(stalls=0.2)

    async def asking() -> list[int]:
        manager = ServerManager([replica], SamplingParams(max_new_tokens=8), 64, "test")
        record = Record(group="p")
        with recording(record):
            answer = asyncio.create_task(manager.generate("a", prompt_ids=[1, 2], sampling_params={}))
        await asyncio.sleep(0)
        await manager.note_partials()
        assert record.partial is None, "it took too long"
        while len(replica.asked) < 2:
            await asyncio.sleep(0.01)
            assert not answer.done(), "what there is of it was taken for the whole answer"
        assert record.partial is not None
        replica.end(replica.asked[1], "stop")
        return (await answer).token_ids

    assert asyncio.run(asking()) == [7, 7]


def test_answers_that_are_noted_keep_their_places_in_the_queue():
    replica = Stalling()

    async def asking() -> None:
        manager = ServerManager([replica], SamplingParams(max_new_tokens=8), 64, "test")
        answers = [
            asyncio.create_task(manager.generate(f"c{number}", prompt_ids=[number], sampling_params={}))
            for number in range(32)
        ]
        await asyncio.sleep(0)
        await manager.note_partials()
        for name in replica.asked[32:]:
            replica.end(name, "stop")
        await asyncio.gather(*answers)

    asyncio.run(asking())
    prompts = [replica.waiting[name][0].prompt_ids for name in replica.asked]
    assert prompts == [[number] for number in range(32)] * 2


def test_a_second_answer_to_the_same_prompt_is_a_draw_of_its_own():
    """The first goes on from what another process left of it, and alone is noted when both are under way."""
    replica = Stalling()

    async def asking() -> None:
        manager = ServerManager([replica], SamplingParams(max_new_tokens=8), 64, "test")
        record = Record(key=5, group="p")
        record.note([1], Output([9, 9], [-1.0] * 2, [0] * 2))
        with recording(record):
            both = [asyncio.create_task(manager.generate("c", prompt_ids=[1], sampling_params={})) for _ in range(2)]
        await asyncio.sleep(0)
        await manager.note_partials()
        assert record.partial is not None
        assert len(record.partial.output.token_ids) == 3
        for name in replica.asked[2:]:
            replica.end(name, "stop")
        await asyncio.gather(*both)

    asyncio.run(asking())
    begun = [replica.waiting[name][0].resume_from for name in replica.asked]
    assert [len(before.token_ids) if before else 0 for before in begun] == [2, 0, 3, 1]
