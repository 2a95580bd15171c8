"""Agents that continue, branch, rewrite, retry and edit answers at random: token budgets, finish reasons, turns and
trained rows against a reference that knows which context each call belongs to."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from tests.support.engine_clients import RequestEngine, engine_client
from verl.agent.loop import AgentLoopOutput
from verl.agent.outputs import RowLimits, build_trajectory
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.call_trace import CallTrace, tracing
from verl.workers.rollout.engine_client import EngineClient
from verl.workers.rollout.training_rows import rows_from_trajectories

BUDGET, WINDOW = 40, 160
END = 1


class UnusedTokens(RequestEngine):
    """Generates unused tokens; `lengths` are the lengths that the model would choose."""

    def __init__(self, lengths: random.Random) -> None:
        super().__init__(self.output)
        self.lengths, self.serial, self.limits = lengths, 1000, list[int]()

    def output(self, request: Request) -> Output:
        most, wanted = request.params.max_new_tokens, self.lengths.randint(1, 25)
        self.limits.append(most)
        count = min(most, wanted)
        tokens = [self.serial + place for place in range(count)]
        self.serial += count
        if wanted <= most:
            tokens[-1] = END
        return Output(tokens, [-0.5] * count, [3] * count, "stop" if wanted <= most else "length")


@dataclass
class Context:
    """Reference of one row: its prompt, what was appended, and what ended it."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reason: str | None = None
    turns: set[tuple[int, ...]] = field(default_factory=set)
    answer: int = 0
    """Number of tokens of the last answer, if the row ends with it."""
    unmatched: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    def append(self, tokens: list[int], mask: int) -> None:
        if not mask and self.response and self.mask[-1] == 0:
            self.turns = self.turns - {tuple(self.ids)}  # one turn of the environment
        self.response, self.mask = self.response + tokens, self.mask + [mask] * len(tokens)
        self.turns = self.turns | {tuple(self.ids)}

    def edit(self, dropped: int, added: list[int]) -> None:
        """Replace the last tokens of the last answer."""
        self.turns = self.turns - {tuple(self.ids)}
        kept = len(self.response) - dropped
        self.response, self.mask = self.response[:kept] + added, self.mask[:kept] + [1] * len(added)
        self.turns, self.unmatched = self.turns | {tuple(self.ids)}, self.unmatched + len(added)

    def fork(self) -> Context:
        return Context(self.prompt, self.response, [0] * len(self.mask), None, set(self.turns))


class Agent:
    """Plays `steps` random moves; `contexts` are its rows, in order."""

    def __init__(self, seed: int, steps: int) -> None:
        self.rng, self.steps = random.Random(seed), steps
        self.engine = UnusedTokens(random.Random(seed + 1))
        self.trace = CallTrace(group="p")
        self.contexts: list[Context] = []
        self.answers: list[tuple[list[int], list[int]]] = []
        """Prompts and answers."""
        self.fresh = 100_000

    def new_tokens(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def run(self) -> None:
        params = SamplingParams(max_new_tokens=BUDGET, eos_token_ids=frozenset([END]))

        async def play() -> None:
            with tracing(self.trace):
                async with engine_client(self.engine, params=params, max_model_len=WINDOW) as client:
                    await self.generate(client, self.start(self.new_tokens(5)))
                    for _ in range(self.steps):
                        context = self.rng.choice([self.proceed, self.proceed, self.rewrite, self.branch])()
                        await self.generate(client, context)

        asyncio.run(play())
        for context in self.contexts[1:]:  # other rows may continue the first one
            self.end(context)

    def start(self, prompt: list[int]) -> Context:
        self.contexts.append(Context(prompt, turns={tuple(prompt)}))
        return self.contexts[-1]

    def proceed(self) -> Context:
        """Append to the last row, sometimes after an edit of the answer's end; its first token is always kept."""
        context = self.contexts[-1]
        if context.answer > 1 and self.rng.random() < 0.7:
            dropped = self.rng.randint(1, min(4, context.answer - 1))
            context.edit(dropped, self.new_tokens(self.rng.choice([0, 0, self.rng.randint(1, dropped)])))
        context.append(self.new_tokens(self.rng.randint(1, 6)), 0)
        context.answer = 0
        return context

    def end(self, context: Context) -> None:
        """Sometimes the end token of the row's last answer is stripped, or the answer is cut."""
        if context.answer < 2 or self.rng.random() < 0.5:
            return
        dropped = self.rng.randint(1, context.answer - 1)
        if context.reason == "stop" and dropped > 1:
            context.reason = "length"
        context.edit(dropped, [])

    def rewrite(self) -> Context:
        """A new row whose prompt begins with that of an earlier one, at times with the first token of an answer to
        another prompt."""
        prompt = self.rng.choice(self.contexts).prompt[:60]
        others = [answer[:1] for asked, answer in self.answers if asked != prompt and answer[0] != END]
        known = self.rng.choice(others) if others and self.rng.random() < 0.5 else []
        return self.start([*prompt, *known, *self.new_tokens(self.rng.randint(1, 15))])

    def branch(self) -> Context:
        """A new row that goes on from an answer of the first one."""
        forked = self.contexts[0].fork()
        if not forked.response:
            return self.rewrite()
        self.contexts.append(forked)
        forked.append(self.new_tokens(2), 0)
        return forked

    async def generate(self, client: EngineClient, context: Context) -> None:
        left = min(BUDGET - len(context.response), WINDOW - len(context.ids))
        known = len(self.engine.limits)
        for _ in range(self.rng.choice([1, 1, 2])):  # an earlier answer of two is thrown away
            answer = await client.generate("one", prompt_ids=context.ids, sampling_params={})
        assert self.engine.limits[known:] == [left] * (len(self.engine.limits) - known)
        assert (left > 0) == bool(answer.token_ids)
        context.reason = answer.extra_fields["finish_reason"]
        context.answer = len(answer.token_ids)
        if answer.token_ids:
            self.answers.append((context.ids, answer.token_ids))
            context.append(answer.token_ids, 1)

    def outputs(self) -> list[AgentLoopOutput]:
        return [AgentLoopOutput(one.prompt, one.response, one.mask) for one in self.contexts]


@pytest.mark.parametrize("seed", range(40))
def test_budgets_reasons_turns_and_rows_are_those_of_each_context(seed):
    agent = Agent(seed, steps=12)
    agent.run()
    trajectory = build_trajectory(agent.outputs(), agent.trace, "p", 0, RowLimits(BUDGET, WINDOW))
    cut = [len(one.response) > BUDGET for one in agent.contexts]  # by what the environment said last
    reasons = ["length" if over else one.reason for over, one in zip(cut, agent.contexts, strict=True)]
    assert [row.finish_reason for row in trajectory.rows] == reasons
    if not any(cut):
        assert trajectory.extra["num_turns"] == len(set().union(*(one.turns for one in agent.contexts)))
    rows = rows_from_trajectories([trajectory], pad_token_id=0)
    masks = [one.mask[:BUDGET] for one in agent.contexts]
    assert [mask[: len(want)] for mask, want in zip(rows.batch["response_mask"].tolist(), masks, strict=True)] == masks
    assert trajectory.extra["agent_metrics"]["unmatched_tokens"] == sum(one.unmatched for one in agent.contexts)


def test_a_rewritten_context_that_begins_with_an_earlier_prompt_has_a_budget_of_its_own():
    engine, trace = UnusedTokens(random.Random(0)), CallTrace(group="p")

    async def generate() -> None:
        params = SamplingParams(max_new_tokens=BUDGET)
        async with engine_client(engine, params=params, max_model_len=512) as client:
            with tracing(trace):
                for rewritten in range(4):
                    prompt = [7, 8, *range(50, 50 + 15 * rewritten)]
                    await client.generate("one", prompt_ids=prompt, sampling_params={})

    asyncio.run(generate())
    assert engine.limits == [BUDGET] * 4


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (30, 5),
        (29, 6),
        (28, 7),  # a stop string
        (1, 34),
        (0, BUDGET),  # rewritten: no token of the answer is there
    ],
)
def test_a_context_whose_last_answer_was_edited_at_its_end_keeps_its_budget(kept, left):
    trace, prompt, answer = CallTrace(), [7, 8], list(range(100, 130))
    trace.add(prompt, Output(answer, [-0.5] * 30, [3] * 30, "stop"))
    assert trace.remaining_tokens(trace.context_of([*prompt, *answer[:kept], *range(50, 55)]), BUDGET) == left


def test_a_context_without_room_or_answer_is_continued_by_what_begins_with_its_prompt():
    trace, prompt, answer = CallTrace(), [7, 8], list(range(100, 140))
    trace.add(prompt, Output(answer, [-0.5] * 40, [3] * 40, "length"))
    trace.add_empty_call([*prompt, *answer, 50])
    assert trace.remaining_tokens(trace.context_of([*prompt, *answer, 50, 51]), BUDGET) == -2
    aborted = CallTrace()
    aborted.add(prompt, Output())
    assert aborted.remaining_tokens(aborted.context_of(prompt), BUDGET) == BUDGET
    assert aborted.remaining_tokens(aborted.context_of([*prompt, 50]), BUDGET) == BUDGET - 1
