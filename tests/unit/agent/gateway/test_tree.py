"""The tree of a session: what is reused, what is a branch, what is trained; for any order of requests."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agent.gateway.agent import build_outputs
from verl.agent.gateway.tree import Tree, prefix_digests
from verl.agent.outputs import build_trajectory
from verl.types.request import Output
from verl.workers.rollout.call_trace import CallTrace

USER = {"role": "user", "content": "How warm is it in Bonn?"}
NEXT = {"role": "user", "content": "And in Rome?"}


class Session:
    """A tree with a tokenizer that takes a character for a token, and remembers what it tokenised."""

    def __init__(self):
        self.tree, self.tokenised, self.serial = Tree(), [], 1000

    def ask(self, *messages, scope="", begun=""):
        found = self.tree.lookup(messages, prefix_digests(scope, messages), begun)
        if found.request is not None:
            return found.request
        self.tokenised.append(found.messages)
        context_ids = [ord(c) for m in found.messages for c in str(m)] + [0]
        return self.tree.add_request(found, context_ids, scope)

    def say(self, request, text="Warm.", tokens=2, calls=None):
        """The model's tokens are numbers that nothing else has."""
        ids = [self.serial + i for i in range(tokens)]
        self.serial += tokens
        reply = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        return self.tree.add_response(request, Output(ids, [-0.5] * tokens, [3] * tokens, "stop"), reply)


def test_messages_that_extend_a_node_take_its_ids_over_and_only_the_rest_is_tokenised():
    session = Session()
    first = session.say(session.ask(USER))
    request = session.ask(USER, first.reply, NEXT)
    assert request.parent is first
    assert session.tokenised == [[USER], [NEXT]]
    assert request.prompt_ids == first.request.context_ids + first.output.token_ids + request.context_ids
    assert session.tree.counts == {"start": 1, "extension": 1}
    second = session.say(request)
    (path,) = session.tree.paths(keep_retries=False)
    assert (path.nodes, path.trained) == ([first, second], [True, True])


@pytest.mark.parametrize(
    "changed",
    [
        lambda said: {**said, "content": said["content"].strip()},
        lambda said: {**said, "content": said["content"].replace("<think>x</think>", "")},
        lambda said: {**said, "content": "something else"},
        lambda said: {**said, "role": "user"},
        lambda said: {**said, "reasoning_content": "x"},
    ],
    ids=["stripped", "thinking dropped", "edited", "role", "added"],
)
def test_a_client_that_changes_what_was_said_branches(changed):
    session = Session()
    first = session.say(session.ask(USER), " <think>x</think>Warm.\n")
    request = session.ask(USER, changed(first.reply), NEXT)
    assert request.parent is None
    assert len(session.tokenised[-1]) == 3
    assert session.tree.counts == {"start": 1, "branch": 1}
    second = session.say(request)
    paths = session.tree.paths(keep_retries=False)
    assert [(path.nodes, path.trained) for path in paths] == [([first], [True]), ([second], [True])]


def test_other_tools_and_an_edited_first_message_branch():
    session = Session()
    first = session.say(session.ask(USER, scope="[weather]"))
    assert session.ask(USER, first.reply, NEXT, scope="[]").parent is None
    assert session.ask(NEXT, first.reply, NEXT, scope="[weather]").parent is None
    assert session.ask(USER, first.reply, NEXT, scope="[weather]").parent is first


def test_answers_that_the_model_never_gave_are_not_appended_to_its_own():
    """A template may write an answer that is not the last one differently."""
    session = Session()
    first = session.say(session.ask(USER))
    assert session.ask(USER, first.reply, NEXT, {"role": "assistant", "content": "Hot."}, NEXT).parent is None


def test_calls_are_the_same_whatever_their_ids_and_however_their_arguments_are_spelt():
    def call(name, arguments):
        return [{"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}]

    session = Session()
    first = session.say(session.ask(USER), "", calls=call("a", '{"x": 1, "y": [2]}'))
    told = {"role": "assistant", "content": None, "tool_calls": call("b", {"y": [2], "x": 1})}
    result = {"role": "tool", "tool_call_id": "b", "content": "4"}
    assert session.ask(USER, told, result).parent is first
    other = {**told, "tool_calls": call("a", json.dumps({"x": True, "y": [2]}))}
    assert session.ask(USER, other, result).parent is None


def test_a_retry_is_a_sibling_and_is_not_tokenised_again():
    session = Session()
    request = session.ask(USER)
    assert session.ask(USER) is request, "the first one may still be under way"
    thrown, kept = session.say(request, "Cold."), session.say(request, "Warm.")
    last = session.say(session.ask(USER, kept.reply, NEXT))
    assert len(session.tokenised) == 2
    assert session.tree.counts == {"start": 1, "retry": 1, "extension": 1}
    assert [path.nodes for path in session.tree.paths(keep_retries=False)] == [[kept, last]]
    assert [path.nodes for path in session.tree.paths(keep_retries=True)] == [[thrown], [kept, last]]


def test_an_answer_is_discarded_when_the_client_continues_from_an_earlier_one_to_the_same_request():
    session = Session()
    request = session.ask(USER)
    kept, discarded = session.say(request, "Warm."), session.say(request, "Cold.")
    last = session.say(session.ask(USER, kept.reply, NEXT))
    assert [path.nodes for path in session.tree.paths(keep_retries=False)] == [[kept, last]]
    assert [path.nodes for path in session.tree.paths(keep_retries=True)] == [[discarded], [kept, last]]


def test_an_answer_that_arrives_after_the_client_went_on_without_it_is_discarded():
    session = Session()
    request = session.ask(USER)
    first = session.say(request, "Warm.")
    last = session.say(session.ask(USER, first.reply, NEXT))
    session.tree.add_response(
        request, Output([9], [-0.5], [3], "stop"), {"role": "assistant", "content": "Cold."}, requested_at=0
    )
    assert [path.nodes for path in session.tree.paths(keep_retries=False)] == [[first, last]]


def test_an_agent_that_starts_again_from_its_first_request_keeps_both_attempts():
    session = Session()
    first = session.say(session.ask(USER))
    dead_end = session.say(session.ask(USER, first.reply, NEXT))
    again = session.say(session.ask(USER), "Cold.")
    assert [path.nodes for path in session.tree.paths(keep_retries=False)] == [[first, dead_end], [again]]


def test_turns_that_paths_share_are_counted_once():
    session = Session()
    first = session.say(session.ask(USER))
    session.say(session.ask(USER, first.reply, NEXT))
    session.say(session.ask(USER, first.reply, {**NEXT, "content": "And in Oslo?"}))
    outputs = build_outputs(session.tree, keep_retries=False)
    assert [output.num_turns for output in outputs] == [4, 2]
    trajectory = build_trajectory(outputs, CallTrace(), "p", 0)
    assert trajectory.extra["num_turns"] == 6
    for output in outputs:
        output.num_turns = 0
    assert build_trajectory(outputs, CallTrace(), "p", 0).extra["num_turns"] == 6, "counted from the tokens"


def test_rows_have_the_messages_of_their_own_context():
    session = Session()
    first = session.say(session.ask(USER), "Warm.")
    session.say(session.ask(USER, first.reply, NEXT), "Hot.")
    edited = {"role": "assistant", "content": "It was warm."}
    session.say(session.ask(USER, edited, NEXT), "Cold.")
    hot, cold = ({"role": "assistant", "content": text} for text in ("Hot.", "Cold."))
    outputs = build_outputs(session.tree, keep_retries=False)
    assert [output.messages for output in outputs] == [[USER, first.reply, NEXT, hot], [USER, edited, NEXT, cold]]


def test_a_retry_that_is_asked_for_another_beginning_is_none():
    session = Session()
    assert session.ask(USER, begun='<tool_call>{"name": "') is not session.ask(USER)


def test_both_continuations_of_an_answer_are_rows_and_its_tokens_are_trained_once():
    session = Session()
    first = session.say(session.ask(USER))
    one = session.say(session.ask(USER, first.reply, NEXT))
    other = session.say(session.ask(USER, first.reply, {**NEXT, "content": "And in Oslo?"}))
    paths = session.tree.paths(keep_retries=False)
    assert [(path.nodes, path.trained) for path in paths] == [
        ([first, one], [True] * 2),
        ([first, other], [False, True]),
    ]


def test_rows_have_every_answer_with_its_log_probs_and_train_it_once():
    session = Session()
    first = session.say(session.ask(USER), tokens=2)
    one = session.say(session.ask(USER, first.reply, NEXT), tokens=1)
    session.say(session.ask(USER, first.reply, {**NEXT, "content": "And in Oslo?"}), tokens=3)
    session.say(session.ask(NEXT), tokens=1)
    shared, second, third = build_outputs(session.tree, keep_retries=False)
    between = one.request.context_ids
    assert shared.prompt_ids == second.prompt_ids == first.request.context_ids
    assert shared.response_ids == [*first.output.token_ids, *between, *one.output.token_ids]
    assert shared.response_mask == [1, 1, *[0] * len(between), 1]
    assert shared.response_logprobs == [-0.5, -0.5, *[0.0] * len(between), -0.5]
    assert shared.response_versions == [3, 3, *[-1] * len(between), 3]
    assert [mask for mask in second.response_mask if mask] == [1] * 3, "what is shared is context here"
    assert (third.response_mask, third.num_turns, shared.num_turns) == ([1], 2, 4)


@given(st.randoms(use_true_random=False), st.integers(1, 25))
def test_whatever_is_asked_every_answer_is_trained_once_or_was_asked_for_again(rng: random.Random, requests: int):
    session, conversations = Session(), [[USER]]
    for _ in range(requests):
        messages = list(rng.choice(conversations))
        if len(messages) > 1 and rng.random() < 0.2:
            messages[rng.randrange(len(messages))] = {"role": rng.choice(["user", "assistant"]), "content": "edited"}
        node = session.say(session.ask(*messages), rng.choice(["Warm.", "Cold."]), tokens=rng.randint(1, 3))
        conversations.append([*messages, node.reply, {"role": "user", "content": rng.choice(["why?", "how?"])}])
    trained = [
        token
        for path in session.tree.paths(False)
        for node, counts in zip(path.nodes, path.trained, strict=True)
        if counts
        for token in node.output.token_ids
    ]
    assert len(trained) == len(set(trained))
    left_out = {t for node in session.tree.nodes for t in node.output.token_ids} - set(trained)
    for number, node in enumerate(session.tree.nodes):
        discarded = bool(left_out & set(node.output.token_ids))
        others = [
            later
            for later in session.tree.nodes[number + 1 :]
            if any(each.request is node.request and each is not node for each in later.path)
        ]
        continued = any(node in later.path[:-1] for later in session.tree.nodes)
        assert discarded == (bool(others) and not continued)
    for path in session.tree.paths(False):
        ids = path.nodes[-1].request.prompt_ids
        for node in path.nodes[:-1]:
            start = len(node.request.prompt_ids)
            assert ids[start : start + len(node.output.token_ids)] == node.output.token_ids
