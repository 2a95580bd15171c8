"""search_agent, a scripted model in the real engine: every branch of the protocol, and whose tokens are whose.

The script knows the whole conversation that must come about, and the model says its part of it: a token that the loop
puts elsewhere, or writes differently, is found at once.
"""

from __future__ import annotations

import asyncio
import functools

import pytest

from tests.support.chat_models import chat_tokenizer
from tests.support.engine_clients import engine_client
from tests.support.script_runner import log_prob, scripted_engine
from tests.support.search_server import serving, write_corpus
from verl.agent.outputs import build_trajectory
from verl.agent.search_loop import FAILED, INVALID, Action, ObservationEncoder, SearchAgentLoop, parse_action
from verl.config import load_config
from verl.search.client import LocalSearcher, format_documents, open_searcher
from verl.search.retriever import open_retriever
from verl.types.request import SamplingParams
from verl.workers.rollout.call_trace import CallTrace, tracing

pytest.importorskip("bm25s")
TOKENIZER = chat_tokenizer("qwen2_5")
PROMPT = TOKENIZER("What colour has Belan?", add_special_tokens=False)["input_ids"]
TEXTS = {"Tavor": "The colour of Tavor is red.", "Belan": "The colour of Belan is blue.", "Corin": "Corin is old."}
ASK, ANSWER = "<think> Belan? </think><search> colour of Belan </search>", "<answer> blue </answer>"


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def told(text, start="<information>", end="</information>"):
    return encode(f"\n\n{start}") + encode(text) + encode(f"{end}\n\n")


@functools.cache
def config_of(*changes):
    given = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "do_search=True", *changes]
    return load_config(None, given, check_files=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.jsonl", TEXTS)


@pytest.fixture(scope="module")
def local(corpus):
    return open_retriever(str(corpus), index_path=str(corpus.parent / "kept"))


def play(conversation, searcher, *changes, room=400, **sampling):
    """Run the loop of a model that says the "model" parts of [(who, token ids)]; its trajectory."""
    config = config_of(*changes)
    whole = PROMPT + [token for _, ids in conversation for token in ids]

    def speak(seen):
        assert list(seen) == whole[: len(seen)]
        return whole[len(seen)] if len(seen) < len(whole) else encode(".")[0]

    async def run():
        trace = CallTrace.for_sample(0, 0, "uid", 0)
        params = SamplingParams(max_new_tokens=room)
        own = {"max_new_tokens": room, "temperature": 1.0, **sampling}
        SearchAgentLoop.searcher = searcher()
        async with engine_client(engine, params=params, max_model_len=1024) as client:
            loop = SearchAgentLoop(
                config=config,
                rollout_config=config.actor_rollout_ref.rollout,
                server_manager=client,
                tokenizer=TOKENIZER,
            )
            with tracing(trace):
                output = await loop.run(own, prompt_ids=list(PROMPT))
        await SearchAgentLoop.searcher.close()
        return build_trajectory(output, trace, "uid", 0)

    engine = scripted_engine(speak, tokenizer=TOKENIZER)
    try:
        trajectory = asyncio.run(run())
    finally:
        engine.close()
    made = [(turn.source, list(turn.token_ids)) for turn in trajectory.rows[0].turns]
    assert made == [("model" if who == "model" else "environment", ids) for who, ids in conversation]
    return trajectory


def test_a_search_is_answered_with_documents_and_every_token_is_whose_it_is(local):
    found = told(format_documents(local.retrieve(["colour of Belan"], 3)[0]).rstrip())
    conversation = [("model", encode(ASK)), ("told", found), ("model", encode(ANSWER))]
    trajectory = play(conversation, lambda: LocalSearcher(local))
    asked, _, answered = trajectory.rows[0].turns
    start = len(PROMPT)
    assert asked.log_probs == pytest.approx([log_prob(start + place) for place in range(len(asked.token_ids))])
    start += len(asked.token_ids) + len(found)
    assert answered.log_probs == pytest.approx([log_prob(start + place) for place in range(len(answered.token_ids))])
    assert set(asked.versions) == set(answered.versions) == {0}
    metrics = trajectory.extra["agent_metrics"]
    assert (metrics["tools"]["search"]["calls"], metrics["tools"]["search"]["errors"]) == (1, 0)
    assert (metrics["unmatched_tokens"], metrics["failures"], metrics["tool_calls"]) == (0, {}, 1)
    assert (trajectory.status, trajectory.rows[0].finish_reason) == ("finished", "stop")


def test_neither_search_nor_answer_is_said_and_counted(local):
    nothing = encode("<search> </search>")
    turns = [("model", nothing), ("told", encode(INVALID)), ("model", encode(ANSWER))]
    assert play(turns, lambda: LocalSearcher(local)).extra["agent_metrics"]["failures"] == {"invalid_action": 1}


def test_a_turn_that_is_too_long_is_cut_and_no_action(local):
    rambling = encode("I wonder " * 20)[:16]
    turns = [("model", rambling), ("told", encode(INVALID)), ("model", encode(ANSWER)[:16])]
    trajectory = play(
        turns[:2] + [("model", encode("<answer>b</answer>"))], lambda: LocalSearcher(local), "data.max_turn_length=16"
    )
    assert trajectory.rows[0].turns[0].finish_reason == "length"


def test_stop_strings_of_the_run_end_turns_besides_those_of_the_protocol(local):
    ask, found = encode(ASK), told(format_documents(local.retrieve(["colour of Belan"], 3)[0]).rstrip())
    stopped = encode("I wonder. Observation:")
    turns = [("model", ask), ("told", found), ("model", stopped), ("told", encode(INVALID)), ("model", encode(ANSWER))]
    play(turns, lambda: LocalSearcher(local), stop=["Observation:"])


def test_the_last_turn_does_not_search(local):
    found = told(format_documents(local.retrieve(["colour of Belan"], 1)[0]).rstrip())
    turns = [("model", encode(ASK)), ("told", found), ("model", encode(ASK))]
    trajectory = play(turns, lambda: LocalSearcher(local), "max_turns=1", "retriever.topk=1")
    assert trajectory.extra["agent_metrics"]["tool_calls"] == 1


def test_long_information_is_cut_inside_its_markers(local):
    start, end, text = encode("\n\n[["), encode("]]\n\n"), encode(format_documents(local.retrieve(["colour"], 3)[0]))
    cut = start + text[: 30 - len(start) - len(end)] + end
    ask = encode("<search>colour</search>")
    markers = ("algorithm.state_masking.start_state_marker=[[", "algorithm.state_masking.end_state_marker=]]")
    turns = [("model", ask), ("told", cut), ("model", encode(ANSWER))]
    play(turns, lambda: LocalSearcher(local), "data.max_obs_length=30", *map(_quoted, markers))


def _quoted(override):
    name, _, value = override.partition("=")
    return f"{name}='{value}'"


def test_information_that_leaves_no_room_for_an_answer_ends_the_trajectory(local):
    ask = encode(ASK)
    trajectory = play([("model", ask)], lambda: LocalSearcher(local), room=len(ask) + 10)
    assert trajectory.rows[0].finish_reason == "length"
    assert trajectory.status == "finished"


@pytest.mark.processes
def test_a_retriever_that_is_killed_costs_the_turn_that_asked(corpus):
    """A real server over HTTP: the first search is answered, then it is killed, and the model answers without it."""
    with serving(corpus) as server:
        url = f"retriever.url={server.url}"
        information = format_documents(
            open_retriever(str(corpus), index_path=str(corpus.parent / "kept")).retrieve(["Belan"], 3)[0]
        )
        first, again = encode("<search>Belan</search>"), encode("<search>Corin</search>")

        class Killing:
            """Asks the real service, which dies after its first answer."""

            def __init__(self):
                self.client = open_searcher(config_of(url).retriever)

            async def retrieve(self, queries, topk):
                found = await self.client.retrieve(queries, topk)
                server.kill()
                return found

            async def close(self):
                await self.client.close()

        turns = [
            *(("model", first), ("told", told(information.rstrip()))),
            *(("model", again), ("told", told(FAILED))),
            ("model", encode(ANSWER)),
        ]
        trajectory = play(turns, Killing, url)
    metrics = trajectory.extra["agent_metrics"]
    assert metrics["failures"] == {"search": 1}
    assert (metrics["tools"]["search"]["calls"], metrics["tools"]["search"]["errors"]) == (2, 1)
    assert trajectory.status == "finished"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> a\nb </search>", Action("search", "a\nb")),
        ("<think>x</think><answer>y</answer>", Action("answer", "y")),
        ("<search>first</search><answer>y</answer>", Action("search", "first")),
        ("<search>no end", Action("invalid")),
        ("<answer> </answer>", Action("invalid")),
        ("<search>a</answer>", Action("invalid")),
        ("", Action("invalid")),
    ],
)
def test_actions_of_a_turn(text, action):
    assert parse_action(text) == action


def test_nothing_found_is_said():
    made = ObservationEncoder(TOKENIZER, "<information>", "</information>", 100)
    assert TOKENIZER.decode(made.documents([])) == "\n\n<information>Nothing was found.</information>\n\n"
