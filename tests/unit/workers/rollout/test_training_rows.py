"""The assembler: trajectories of any shape, written out by hand, and the law that their rows obey."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.types.schema import COLUMNS
from verl.types.trajectory import Headers, Row, Trajectory, Turn
from verl.workers.rollout.training_rows import rows_from_trajectories, trajectories_from_rows

PAD = 0


def model(tokens: list[int], version: int = 3, reason: str = "stop", **fields) -> Turn:
    return Turn("model", tokens, [-token / 100 for token in tokens], [version] * len(tokens), reason, **fields)


def environment(tokens: list[int], **fields) -> Turn:
    return Turn("environment", tokens, **fields)


def column(rows: DataProto, name: str) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in rows.batch[name].tolist()]


def test_rows_of_a_plain_answer_a_tool_call_and_a_rewritten_context_as_written_by_hand():
    plain = Trajectory("a", 0, [Row([1, 2], [model([11, 12], version=5)])])
    tool = Trajectory("a", 1, [Row([1, 2], [model([21]), environment([91, 92]), model([22], reason="length")])])
    rewritten = Trajectory(
        "b",
        0,
        [
            Row([3], [model([31, 32]), environment([93])]),
            Row([3, 4, 5, 6], [model([33], version=4, reason="abort")]),
            Row([7, 8], [environment([94]), model([34, 35], version=5)]),
        ],
    )
    rows = rows_from_trajectories([plain, tool, rewritten], PAD)
    assert {name: array.tolist() for name, array in rows.non_tensor_batch.items()} == {
        "uid": ["a", "a", "b", "b", "b"],
        "sample_index": [0, 1, 0, 0, 0],
        "trajectory": ["a/0", "a/1", "b/0", "b/0", "b/0"],
        "finish_reason": ["stop", "length", "stop", "abort", "stop"],
    }
    assert column(rows, "prompts") == [[0, 0, 1, 2], [0, 0, 1, 2], [0, 0, 0, 3], [3, 4, 5, 6], [0, 0, 7, 8]]
    assert column(rows, "responses") == [
        [11, 12, 0, 0],
        [21, 91, 92, 22],
        [31, 32, 93, 0],
        [33, 0, 0, 0],
        [94, 34, 35, 0],
    ]
    assert column(rows, "response_mask") == [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]]
    assert column(rows, "attention_mask") == [
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 0],
    ]
    assert column(rows, "position_ids")[1] == [0, 0, 0, 1, 2, 3, 4, 5]
    assert column(rows, "rollout_log_probs") == [
        [-0.11, -0.12, 0, 0],
        [-0.21, 0, 0, -0.22],
        [-0.31, -0.32, 0, 0],
        [-0.33, 0, 0, 0],
        [0, -0.34, -0.35, 0],
    ]
    assert column(rows, "rollout_versions") == [
        [5, 5, -1, -1],
        [3, -1, -1, 3],
        [3, 3, -1, -1],
        [4, -1, -1, -1],
        [-1, 5, 5, -1],
    ]
    assert torch.equal(rows.batch["input_ids"], torch.cat([rows.batch["prompts"], rows.batch["responses"]], dim=1))
    for name in rows.batch.keys():
        assert str(rows.batch[name].dtype) == f"torch.{COLUMNS[name].dtype}", name


def test_an_answer_aborted_before_its_first_token_is_a_row_without_one():
    rows = rows_from_trajectories(
        [Trajectory("a", 0, [Row([1], [model([], reason="abort")])]), Trajectory("a", 1, [Row([1], [model([5])])])], PAD
    )
    assert column(rows, "response_mask") == [[0], [1]]
    assert column(rows, "rollout_versions") == [[-1], [3]]
    assert rows.non_tensor_batch["finish_reason"].tolist() == ["abort", "stop"]


def test_what_was_drawn_from_is_a_column_on_request():
    greedy, said = model([5, 6], drawn_log_probs=[0.0, 0.0]), model([7], drawn_log_probs=[-0.5])
    both = [Trajectory("a", 0, [Row([1], [greedy, environment([9]), said])])]
    drawn = rows_from_trajectories(both, PAD, with_drawn=True)
    assert column(drawn, "rollout_drawn_log_probs") == [[0, 0, 0, -0.5]]
    assert "rollout_drawn_log_probs" not in rows_from_trajectories(both, PAD).batch.keys()


def test_what_a_sampled_token_lacks_is_marked_so_that_rows_with_and_without_it_can_be_joined():
    said, silent = model([5], drawn_log_probs=[-0.5]), Turn("model", [6, 7])
    mixed = rows_from_trajectories(
        [Trajectory("a", 0, [Row([1], [said, environment([9]), silent])])], PAD, None, 5, True
    )
    alone = rows_from_trajectories([Trajectory("a", 1, [Row([1], [silent])])], PAD, None, 5, True)
    rows = DataProto.concat([mixed, alone])
    for name, first in (("rollout_log_probs", -0.05), ("rollout_drawn_log_probs", -0.5)):
        expected = torch.tensor([[first, 0, math.nan, math.nan, 0], [math.nan, math.nan, 0, 0, 0]])
        torch.testing.assert_close(rows.batch[name], expected, equal_nan=True)
    assert column(rows, "rollout_versions") == [[3, -1, -1, -1, -1], [-1] * 5]
    assert column(rows, "response_mask") == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]]


def test_turn_rewards_sit_on_the_last_token_sampled_until_then_in_whichever_row():
    turns = [model([5, 6], reward=1.0), environment([9, 9], reward=0.25), model([7]), environment([9], reward=0.5)]
    later = [environment([9], reward=2.0), model([8])]
    rows = rows_from_trajectories([Trajectory("a", 0, [Row([1], turns), Row([1], later)])], PAD)
    assert column(rows, "turn_rewards") == [[0, 1.25, 0, 0, 2.5, 0], [0] * 6]
    early = [environment([9], reward=0.5), model([7]), environment([9], reward=1.0)]
    assert column(rows_from_trajectories([Trajectory("a", 0, [Row([1], early)])], PAD), "turn_rewards") == [[0, 1.5, 0]]
    unsampled = rows_from_trajectories([Trajectory("a", 0, [Row([1], [environment([9], reward=0.5)])])], PAD)
    assert column(unsampled, "turn_rewards") == [[0]]
    assert "turn_rewards" not in rows_from_trajectories([Trajectory("a", 0, [Row([1], [model([8])])])], PAD).batch


def test_what_an_agent_says_of_a_trajectory_is_on_each_of_its_rows_and_what_all_agents_say_in_the_same_columns():
    turns = [model([5], reward=0.5), environment([9, 9], name="search"), model([])]
    extra = {"num_turns": 4, "agent_metrics": {"status": "finished"}, "own": "x", "uid": "mine"}
    one = Trajectory("a", 0, [Row([1], turns), Row([1], [model([6])])], score=0.25, extra=extra)
    rows = rows_from_trajectories([one, Trajectory("a", 1, [Row([1], [model([7])])], extra={"num_turns": 1})], PAD)
    objects = {name: array.tolist() for name, array in rows.non_tensor_batch.items()}
    assert objects["num_turns"] == [4, 4, 1]
    assert objects["given_score"] == [0.25, 0.25, None]
    assert objects["uid"] == ["a"] * 3
    assert objects["extra_fields"] == [{"own": "x", "uid": "mine"}] * 2 + [{}]
    assert objects["agent_turns"] == [
        [("model", 1, None, 0.5), ("environment", 2, "search", None)],
        [("model", 1, None, None)],
        [("model", 1, None, None)],
    ]
    other = rows_from_trajectories([Trajectory("b", 0, [Row([1], [model([7])])], extra={"num_turns": 1})], PAD)
    assert (other.batch.keys(), other.non_tensor_batch.keys()) == (rows.batch.keys(), rows.non_tensor_batch.keys())


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_what_did_not_go_through_to_its_end_is_not_learned_from(status):
    broken = Trajectory("a", 0, [Row([1], [model([5]), environment([9])]), Row([1], [model([6])])], status=status)
    rows = rows_from_trajectories([broken, Trajectory("a", 1, [Row([1], [model([7])])])], PAD)
    assert column(rows, "response_mask") == [[0, 0], [0, 0], [1, 0]]
    assert column(rows, "rollout_versions") == [[3, -1], [3, -1], [3, -1]]


def test_widths_are_kept_and_what_does_not_fit_is_refused():
    one = [Trajectory("a", 0, [Row([1, 2], [model([5, 6, 7])])])]
    rows = rows_from_trajectories(one, PAD, prompt_length=3, response_length=4)
    assert column(rows, "input_ids") == [[0, 1, 2, 5, 6, 7, 0]]
    with pytest.raises(ValueError, match=r"response_length"):
        rows_from_trajectories(one, PAD, response_length=2)
    with pytest.raises(ValueError, match=r"prompt_length"):
        rows_from_trajectories(one, PAD, prompt_length=1)


def test_no_trajectories_are_no_rows():
    assert rows_from_trajectories([], PAD, prompt_length=4).batch["input_ids"].shape == (0, 4)


TOKENS = st.lists(st.integers(1, 99), max_size=5)
TURNS = st.builds(lambda by_model, tokens: model(tokens) if by_model else environment(tokens), st.booleans(), TOKENS)
ROWS = st.builds(Row, TOKENS, st.lists(TURNS, max_size=4))


@given(st.lists(st.lists(ROWS, max_size=3), max_size=5), st.integers(0, 3))
def test_rows_hold_exactly_the_trajectories_tokens_in_order(rows_of_each, room):
    trajectories = [Trajectory("u", index, rows) for index, rows in enumerate(rows_of_each)]
    rows = [row for each in rows_of_each for row in each]
    width = max((row.response_length for row in rows), default=0) + room
    batch = rows_from_trajectories(trajectories, pad_token_id=100, response_length=width).batch
    assert len(batch["responses"]) == len(rows)
    for number, row in enumerate(rows):
        there = {name: batch[name][number] for name in batch.keys()}
        attended, sampled = there["attention_mask"].bool(), there["response_mask"].bool()
        tokens = [token for turn in row.turns for token in turn.token_ids]
        assert there["input_ids"][attended].tolist() == [*row.prompt_ids, *tokens]
        assert (there["input_ids"][~attended] == 100).all()
        assert there["position_ids"][attended].tolist() == list(range(len(row.prompt_ids) + len(tokens)))
        model_turns = [turn for turn in row.turns if turn.source == "model"]
        assert there["responses"][sampled].tolist() == [token for turn in model_turns for token in turn.token_ids]
        assert there["rollout_versions"][sampled].tolist() == [v for turn in model_turns for v in turn.versions]
        log_probs = torch.tensor([value for turn in model_turns for value in turn.log_probs])
        assert torch.equal(there["rollout_log_probs"][sampled], log_probs)
        assert (there["rollout_versions"][~sampled] == -1).all()
        assert (there["rollout_log_probs"][~sampled] == 0).all()
        columns = torch.arange(width)
        assert torch.equal(attended[-width:] if width else attended[:0], columns < len(tokens))


def test_experts_stand_beside_the_tokens_they_are_of_and_are_said_to_be_unknown_elsewhere():
    told = np.arange(1, 7, dtype=np.uint8).reshape(6, 1, 1)
    turns = [model([21], routed_experts=told[:2]), environment([91, 92]), model([22], routed_experts=told[:5])]
    trajectories = [
        Trajectory("a", 0, [Row([1, 2], turns)]),
        Trajectory("a", 1, [Row([1], [model([31, 32, 33], routed_experts=told[:3]), environment([94])])]),
        Trajectory("b", 0, [Row([3], [model([41])])]),
        Trajectory("b", 1, [Row([5, 6], [model([42], routed_experts=told)])]),
    ]
    rows = rows_from_trajectories(trajectories, PAD)
    assert rows.batch["routed_experts"].dtype == torch.uint8
    assert rows.batch["routed_experts"].flatten(1).tolist() == [
        [1, 2, 3, 4, 5, 255],
        [255, 1, 2, 3, 255, 255],
        [255] * 6,
        [1, 2, 3, 255, 255, 255],
    ]
    assert "routed_experts" not in rows_from_trajectories(trajectories[2:3], PAD).batch.keys()
    unknown = rows_from_trajectories(trajectories[2:3], PAD, experts_template=told[:0]).batch["routed_experts"]
    assert unknown.dtype == torch.uint8
    assert unknown.shape == (1, unknown.shape[1], *told.shape[1:])
    assert (unknown == 255).all(), "rows of agents that failed can be joined with others"
    assert "routed_experts" not in rows_from_trajectories(trajectories, PAD, with_experts=False).batch.keys()


# ---------------------------------------------------------------- rows back to trajectories


@st.composite
def model_turns(draw: st.DrawFn, start: int, rewards: bool) -> Turn:
    """A model turn whose first token is at `start`; log-probs, versions and experts may be unknown."""
    tokens, known = draw(TOKENS), draw(st.booleans())
    turn = model(tokens, draw(st.integers(0, 3)), draw(st.sampled_from(["stop", "length", "abort"])))
    if not known:
        turn.log_probs = turn.versions = None
    if draw(st.booleans()):
        turn.drawn_log_probs = [-0.25] * len(tokens)
    if draw(st.booleans()) and tokens:
        rows = start + len(tokens) - draw(st.integers(1, 2))
        turn.routed_experts = (np.arange(max(0, rows) * 4, dtype=np.uint8) % 7).reshape(-1, 2, 2)
    turn.reward = draw(st.none() | st.just(0.5)) if rewards and tokens else None
    return turn


@st.composite
def agent_rows(draw: st.DrawFn) -> Row:
    prompt = draw(st.lists(st.integers(1, 99), min_size=1, max_size=4))
    turns: list[Turn] = []
    for by_model in draw(st.lists(st.booleans(), max_size=4)):
        if by_model:
            turns.append(draw(model_turns(len(prompt) + sum(len(turn.token_ids) for turn in turns), rewards=True)))
        else:
            reward = draw(st.none() | st.just(0.25)) if (tokens := draw(TOKENS)) else None
            turns.append(environment(tokens, name=draw(st.none() | st.just("search")), reward=reward))
    return Row(prompt, turns, draw(st.none() | st.just([{"role": "user", "content": "x"}])))


@st.composite
def single_turn_rows(draw: st.DrawFn) -> Row:
    prompt = draw(st.lists(st.integers(1, 99), min_size=1, max_size=4))
    return Row(prompt, [draw(model_turns(len(prompt), rewards=False))])


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories of agents, with one to three rows each, or single-turn responses."""
    by_agents, trajectories = draw(st.booleans()), []
    for number in range(draw(st.integers(1, 4))):
        rows = draw(st.lists(agent_rows(), min_size=1, max_size=3)) if by_agents else [draw(single_turn_rows())]
        extra = {"num_turns": len(rows), "agent_metrics": {"tool_s": 0.5}, "own": number} if by_agents else {}
        status, score = draw(st.sampled_from(["finished", "aborted", "failed"])), draw(st.none() | st.just(0.75))
        score = score if by_agents else None
        trajectories.append(Trajectory(f"u/{number // 2}", number % 2, rows, status, score, extra))
    return trajectories


@given(batches(), st.booleans(), st.booleans(), st.integers(0, 2))
def test_trajectories_from_rows_give_the_same_rows_again(trajectories, with_drawn, with_experts, room):
    width = max(row.response_length for one in trajectories for row in one.rows) + room
    options: dict[str, Any] = {"pad_token_id": 100, "response_length": width, "with_drawn": with_drawn}
    template = np.empty((0, 2, 2), np.uint8) if with_experts else None
    options |= {"experts_template": template, "with_experts": with_experts}
    rows = rows_from_trajectories(trajectories, **options)
    read = [
        replace(one, status=before.status, score=before.score)
        for one, before in zip(trajectories_from_rows(rows), trajectories, strict=True)
    ]
    again = rows_from_trajectories(read, **options)
    assert {name: values.tolist() for name, values in again.non_tensor_batch.items()} == {
        name: values.tolist() for name, values in rows.non_tensor_batch.items()
    }
    assert set(again.batch.keys()) == set(rows.batch.keys())
    for name in rows.batch.keys():
        torch.testing.assert_close(again.batch[name], rows.batch[name], rtol=0, atol=0, equal_nan=True, msg=name)
    first, second = Headers.of(trajectories), Headers.of(read)
    assert (second.names, second.versions, second.row_counts.tolist()) == (
        first.names,
        first.versions,
        first.row_counts.tolist(),
    )
    assert second.tokens.tolist() == first.tokens.tolist()
    assert second.token_offsets.tolist() == first.token_offsets.tolist()
