"""Laws of the scheduler: batch, memory, steps ahead, aborts and weight updates do not change the answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.hash_runner import VOCAB, HashRunner, expected
from verl.inference.block_manager import BlockManager
from verl.inference.constraints import StopStringChecker
from verl.inference.engine import Engine
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams

MAX_MODEL_LEN = 40
LETTERS = "abcdefg"


class LetterTokenizer:
    """A letter per token."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(LETTERS[token] for token in token_ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return LETTERS[token]


@dataclass
class House:
    """An engine, everybody who ever came, and the events that happen to them."""

    engine: Engine
    runner: HashRunner
    everyone: list[Sequence]
    admitted: set[Sequence] = field(default_factory=set)
    reported: set[Sequence] = field(default_factory=set)

    def add(self, requests: list[Request]) -> None:
        tokenizer = LetterTokenizer()
        sequences = [
            Sequence(r, len(self.everyone) + i, StopStringChecker(tokenizer, r.params.stop) if r.params.stop else None)
            for i, r in enumerate(requests)
        ]
        self.engine.add(sequences)
        self.everyone += sequences

    def step(self) -> None:
        self.report(self.engine.step())
        self.check()

    def report(self, finished: list[Sequence]) -> None:
        """Everybody is reported once, and only who ended by itself."""
        for sequence in finished:
            assert sequence.done
            assert sequence not in self.reported
            assert sequence.output.finish_reason != "abort"
            self.reported.add(sequence)

    def abort(self, index: int) -> None:
        unfinished = [s for s in self.everyone if not s.done]
        if unfinished:
            self.engine.remove([unfinished[index % len(unfinished)]])
            self.check()

    def resume(self, index: int) -> None:
        """Ask again for one that was aborted."""
        aborted = [s for s in self.everyone if s.done and s.output.finish_reason == "abort" and not s.aborted]
        if aborted:
            sequence = aborted[index % len(aborted)]
            sequence.aborted = True  # Here: it was asked for again.
            self.add([replace(sequence.request, resume_from=sequence.output)])

    def update(self, drain: bool) -> None:
        """New weights; a real update drains first, and the scheduler must not depend on it."""
        if drain:
            self.report(self.engine.drain())
        self.runner.weights += 1
        self.engine.version += 1
        self.engine.preempt_all()
        self.check()

    def check(self) -> None:
        """What holds between any two events."""
        scheduler = self.engine.scheduler
        running = list(scheduler.decoding) + ([scheduler.prefilling] if scheduler.prefilling else [])
        waiting = [s for s in scheduler.waiting if not s.done]
        check_blocks(scheduler.blocks, running)
        slots = [s.slot for s in running] + scheduler.free_slots
        assert sorted(slots) == list(range(len(slots)))
        assert all(s.slot == -1 and not s.block_table for s in self.everyone if s not in running)
        assert set(running) | set(waiting) == {s for s in self.everyone if not s.done}
        # First come, first served: who runs came before who waits, and nobody was ever passed over.
        order = [s.arrival for s in running + waiting]
        assert order == sorted(order)
        self.admitted |= {s for s in running}
        unfinished_and_new = [s.arrival for s in waiting if s not in self.admitted]
        assert not unfinished_and_new or min(unfinished_and_new) > max([s.arrival for s in self.admitted], default=-1)


def check_blocks(blocks: BlockManager, holders: list[Sequence]) -> None:
    """Every block is blank, reusable or held, and counted exactly."""
    held = Counter(block for sequence in holders for block in sequence.block_table)
    assert [held[block] for block in range(blocks.num_blocks)] == blocks.references
    free = blocks.uncached_free + list(blocks.cached_free)
    assert len(free) == blocks.free_blocks
    assert sorted([*free, *held]) == list(range(blocks.num_blocks))
    assert all(len(set(sequence.block_table)) == len(sequence.block_table) for sequence in holders)
    findable = {block for block in range(blocks.num_blocks) if blocks.key_by_block[block] is not None}
    assert findable == set(blocks.block_by_key.values())
    assert findable >= set(blocks.cached_free)
    assert not findable & set(blocks.uncached_free)


@st.composite
def houses(draw: st.DrawFn) -> House:
    block_size = draw(st.integers(1, 5))
    needed = -(-(MAX_MODEL_LEN - 1) // block_size)
    # Mostly so few that sequences have to give way to each other.
    num_blocks = needed + draw(st.integers(0, 2 * needed))
    max_num_seqs, budget = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    blocks = BlockManager(num_blocks, block_size, draw(st.booleans()))
    scheduler = Scheduler(blocks, max_num_seqs, budget, MAX_MODEL_LEN, draw(st.booleans()))
    runner = HashRunner(num_blocks, block_size, max_num_seqs, budget, steps_ahead=draw(st.sampled_from([0, 1, 1, 2])))
    return House(Engine(scheduler, runner), runner, [])


@st.composite
def arrivals(draw: st.DrawFn) -> list[Request]:
    """Some groups, one after the other or interleaved; prompts of three letters, so that prefixes are often equal."""
    params = SamplingParams(
        max_new_tokens=draw(st.integers(1, 30)),
        min_new_tokens=draw(st.sampled_from([0, 0, 1])),
        eos_token_ids=frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))),
        stop=draw(st.sampled_from([(), (), ("ab",), ("abc", "dd"), ("g",)])),
    )
    requests = []
    for group in range(draw(st.integers(1, 3))):
        base = draw(st.sampled_from([[], [0, 1, 2] * 4, [1] * 9]))
        prompt = [*base, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))]
        name = draw(st.sampled_from(["", f"group-{group}", "same name, other prompt"]))
        keys = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
        requests += [Request("", prompt, replace(params, key=key), group=name) for key in keys]
    return requests if draw(st.booleans()) else requests[::2] + requests[1::2]


EVENTS = st.one_of(
    st.tuples(st.just("add"), arrivals()),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("resume"), st.integers(0, 20)),
    st.tuples(st.just("update"), st.booleans()),
)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(house=houses(), events=st.lists(EVENTS, min_size=1, max_size=12))
def test_every_request_gets_the_answer_it_would_get_alone_and_nothing_leaks(house: House, events):
    for name, value in events:
        if name == "step":
            for _ in range(value):
                house.step()
        else:
            getattr(house, name)(value)
    for _ in range(40 * len(house.everyone) + 40):
        if not house.engine.has_work:
            break
        house.step()
    assert not house.engine.has_work, "every request finishes"
    assert house.engine.scheduler.blocks.free_blocks == house.engine.scheduler.blocks.num_blocks
    for sequence in house.everyone:
        assert sequence.output == expected(sequence, sequence.output)
        check_end(sequence)
        assert (sequence in house.reported) == (sequence.output.finish_reason != "abort")


def check_end(sequence: Sequence) -> None:
    """It ended where it should: not before, and not after."""
    output, params = sequence.output, sequence.params
    limit = min(params.max_new_tokens, MAX_MODEL_LEN - len(sequence.prompt_ids))
    ends = [
        n
        for n in range(1, len(output.token_ids) + 1)
        if output.token_ids[n - 1] in params.end_token_ids
        or (n >= params.min_new_tokens and completes(output, n, params.stop))
    ]
    if output.finish_reason == "stop":
        assert ends == [len(output.token_ids)]
    else:
        assert ends == []
        assert len(output.token_ids) == limit if output.finish_reason == "length" else len(output.token_ids) < limit


def completes(output: Output, n: int, stop: tuple[str, ...]) -> bool:
    return LetterTokenizer().decode(output.token_ids[:n]).endswith(stop)
