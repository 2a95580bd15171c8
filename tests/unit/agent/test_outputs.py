"""A loop's outputs as trajectories: turns by the mask, log-probs and versions by token match."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from verl.agent.loop import AgentLoopMetrics, AgentLoopOutput
from verl.agent.outputs import RowLimits, build_trajectory, failed_trajectory
from verl.types.request import Output
from verl.types.trajectory import Trajectory
from verl.workers.rollout.call_trace import CallTrace, ModelCall
from verl.workers.rollout.training_rows import rows_from_trajectories


def answer(prompt: list[int], tokens: list[int], first: float, version: int = 7, reason: str = "stop") -> ModelCall:
    """Log-probs count down from `first`, so that each token's is known."""
    log_probs = [first - step for step in range(len(tokens))]
    return ModelCall(
        prompt, Output(tokens, log_probs, [version] * len(tokens), reason, sampled_log_probs=log_probs), 0.5
    )


def made(outputs: AgentLoopOutput | list[AgentLoopOutput], *calls: ModelCall) -> Trajectory:
    return build_trajectory(outputs, CallTrace(calls=list(calls)), "prompt", 3)


def test_two_turns_with_a_tool_between_get_what_the_server_said_token_for_token():
    output = AgentLoopOutput([1, 2], [10, 11, 90, 91, 12], [1, 1, 0, 0, 1], num_turns=4)
    second = answer([1, 2, 10, 11, 90, 91], [12], -5.0, version=8)
    second.output.preemptions = 2
    trajectory = made(output, answer([1, 2], [10, 11], -1.0), second)
    rows = rows_from_trajectories([trajectory], pad_token_id=0)
    assert rows.batch["response_mask"].tolist() == [[1, 1, 0, 0, 1]]
    assert rows.batch["rollout_log_probs"].tolist() == [[-1.0, -2.0, 0.0, 0.0, -5.0]]
    assert rows.batch["rollout_versions"].tolist() == [[7, 7, -1, -1, 8]]
    assert rows.non_tensor_batch["trajectory"].tolist() == ["prompt/3"]
    assert trajectory.extra["num_turns"] == 4
    metrics = trajectory.extra["agent_metrics"]
    assert (metrics["unmatched_tokens"], metrics["turns"], metrics["generate_s"]) == (0, 2, 1.0)
    assert metrics["num_preempted"] == 2
    assert (metrics["status"], trajectory.status, trajectory.score) == ("finished", "finished", None)


def test_tokens_the_model_never_sampled_there_are_stale():
    """A changed token, and an answer to another context: what training would compute is not what the server said."""
    changed = made(AgentLoopOutput([1], [10, 99, 12], [1, 1, 1]), answer([1], [10, 11, 12], -1.0))
    turn = changed.rows[0].turns[0]
    assert turn.log_probs[0] == -1.0
    assert all(math.isnan(value) for value in turn.log_probs[1:])
    assert turn.versions == [7, -1, -1]
    elsewhere = made(AgentLoopOutput([1, 5], [10], [1]), answer([1, 4], [10], -1.0))
    assert elsewhere.rows[0].turns[0].versions == [-1]
    assert changed.extra["agent_metrics"]["unmatched_tokens"] == 2


def test_a_loop_that_goes_on_after_edited_tokens_matches_again_where_the_server_answered():
    output = AgentLoopOutput([1], [10, 98, 12, 13], [1, 1, 1, 1])
    trajectory = made(output, answer([1], [10, 11], -1.0), answer([1, 10, 98], [12, 13], -3.0))
    assert trajectory.rows[0].turns[0].versions == [7, -1, 7, 7]
    assert trajectory.rows[0].turns[0].log_probs[2:] == [-3.0, -4.0]


def test_of_several_answers_to_one_context_the_one_that_was_kept_counts():
    calls = answer([1], [10, 11], -1.0), answer([1], [20, 21], -5.0)
    assert made(AgentLoopOutput([1], [20, 21], [1, 1]), *calls).rows[0].turns[0].log_probs == [-5.0, -6.0]


def test_a_row_ended_as_the_server_said_also_if_its_loop_strips_the_end_token():
    call = answer([1], [10, 11, 12], -1.0)
    call.end_ids = frozenset([12])
    assert made(AgentLoopOutput([1], [10, 11], [1, 1]), call).rows[0].finish_reason == "stop"
    assert made(AgentLoopOutput([1], [10, 11, 12], [1, 1, 1]), call).rows[0].finish_reason == "stop"
    told = AgentLoopOutput([1], [10, 11, 12, 90], [1, 1, 1, 0], finish_reason="length")
    assert made(told, call).rows[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("engine", "kept", "appended", "reason"),
    [
        ("stop", 5, [], "stop"),
        ("stop", 4, [], "stop"),  # without the end token
        ("stop", 3, [], "length"),
        ("stop", 2, [], "length"),
        ("stop", 3, [90], "stop"),  # the row continues without a stop string
        ("length", 2, [], "length"),
        ("abort", 2, [], "abort"),
    ],
)
def test_an_answer_that_the_loop_cut_at_the_end_of_a_row_ended_by_length(engine, kept, appended, reason):
    call, tokens = answer([1], [10, 11, 12, 13, 2], -1.0, reason=engine), [10, 11, 12, 13, 2][:kept]
    call.end_ids = frozenset([2, 3])
    output = AgentLoopOutput([1], tokens + appended, [1] * kept + [0] * len(appended))
    assert made(output, call).rows[0].finish_reason == reason


def test_an_answer_whose_end_the_loop_replaced_ended_as_the_server_said():
    output = AgentLoopOutput([1], [10, 99], [1, 1])
    assert made(output, answer([1], [10, 11, 12], -1.0)).rows[0].finish_reason == "stop"


def no_room(prompt: list[int]) -> ModelCall:
    return ModelCall(prompt, Output(finish_reason="length"))


def test_a_call_without_room_ends_the_row_that_it_continues_and_no_other():
    """Two agents take turns: the first one has no room for its second answer."""
    rows = [AgentLoopOutput([1], [10, 90], [1, 0]), AgentLoopOutput([5], [20], [1])]
    calls = answer([1], [10], -1.0), answer([5], [20], -2.0)
    trajectory = made(rows, *calls, no_room([1, 10, 90]))
    assert [row.finish_reason for row in trajectory.rows] == ["length", "stop"]
    judged = made(rows, *calls, no_room([7, 8]))
    assert [row.finish_reason for row in judged.rows] == ["stop", "stop"]


def test_a_last_call_without_room_ends_the_last_row_also_if_its_answers_were_edited():
    row = AgentLoopOutput([5], [29, 91], [1, 0])
    assert made(row, answer([5], [20], -2.0), no_room([5, 28, 91])).rows[0].finish_reason == "length"


def test_a_trajectory_is_aborted_with_its_last_call_and_finished_rows_stay_finished():
    rows = [AgentLoopOutput([1], [10, 90], [1, 0]), AgentLoopOutput([5], [20], [1])]
    for prompt, reasons in (([1, 10, 90], ["abort", "stop"]), ([7, 8], ["stop", "stop"])):
        aborted = answer(prompt, [], -1.0, reason="abort")
        trajectory = made(rows, answer([1], [10], -1.0), answer([5], [20], -2.0), aborted)
        assert [row.finish_reason for row in trajectory.rows] == reasons
        assert trajectory.status == "aborted"


def test_experts_are_those_of_tokens_that_were_kept():
    """What came after the cut was another token: the router chooses for the one that stands there now."""
    cut = answer([1, 2], [10, 11, 12], -1.0)
    cut.output.routed_experts = np.arange(1, 5, dtype=np.uint8).reshape(4, 1, 1)
    trajectory = made(AgentLoopOutput([1, 2], [10, 90, 91], [1, 0, 0]), cut)
    rows = rows_from_trajectories([trajectory], pad_token_id=0)
    assert rows.batch["routed_experts"].flatten().tolist() == [1, 2, 3, 255, 255]
    whole = made(AgentLoopOutput([1, 2], [10, 11, 12, 90], [1, 1, 1, 0]), cut)
    assert rows_from_trajectories([whole], 0).batch["routed_experts"].flatten().tolist() == [1, 2, 3, 4, 255, 255]


def test_own_lists_fill_what_the_server_does_not_know():
    output = AgentLoopOutput([1], [10, 50], [1, 1], response_logprobs=[-9.0, -9.5], response_versions=[1, 2])
    trajectory = made(output, answer([1], [10], -1.0))
    assert trajectory.rows[0].turns[0].log_probs == [-1.0, -9.5]
    assert trajectory.rows[0].turns[0].versions == [7, 2]
    assert trajectory.extra["agent_metrics"]["unmatched_tokens"] == 0


def test_several_outputs_are_rows_of_one_trajectory_and_their_metrics_add_up():
    told = AgentLoopMetrics(tool_calls=0.25, tool_call_counts=1, tools={"search": {"calls": 1, "seconds": 0.25}})
    outputs = [
        AgentLoopOutput([1], [10], [1], metrics=told, extra_fields={"note": "first"}),
        AgentLoopOutput([1, 2, 3], [20], [1], metrics=told, reward_score=0.5, num_turns=6, extra_fields={"note": "x"}),
    ]
    trajectory = made(outputs, answer([1], [10], -1.0), answer([1, 2, 3], [20], -2.0))
    assert [list(row.prompt_ids) for row in trajectory.rows] == [[1], [1, 2, 3]]
    assert (trajectory.score, trajectory.extra["num_turns"], trajectory.extra["note"]) == (0.5, 6, "x")
    metrics = trajectory.extra["agent_metrics"]
    assert metrics["tools"] == {"search": {"calls": 2, "seconds": 0.5}}
    assert (metrics["tool_s"], metrics["tool_calls"]) == (0.5, 2)


def test_rewards_of_turns_stand_on_the_last_token_sampled_until_then():
    output = AgentLoopOutput([1], [10, 90, 11, 91], [1, 0, 1, 0], turn_rewards=[(2, 0.5), (3, 0.25), (4, 1.0)])
    calls = answer([1], [10], -1.0), answer([1, 10, 90], [11], -1.0)
    rows = rows_from_trajectories([made(output, *calls)], pad_token_id=0)
    assert rows.batch["turn_rewards"].tolist() == [[0.5, 0.0, 1.25, 0.0]]
    with pytest.raises(ValueError, match=r"turn_rewards: .*\b9\b.*\b1 response tokens"):
        made(AgentLoopOutput([1], [10], [1], turn_rewards=[(9, 1.0)]))


def test_a_failed_trajectory_shows_its_last_context_and_teaches_nothing():
    calls = [answer([1, 2], [10], -1.0), answer([1, 2, 10, 90], [11], -2.0)]
    trajectory = failed_trajectory(KeyError("x"), CallTrace(calls=calls), "prompt", 0, [1, 2], 9)
    rows = rows_from_trajectories([trajectory], pad_token_id=0)
    assert rows.batch["prompts"].tolist() == [[1, 2]]
    assert rows.batch["responses"].tolist() == [[10, 90, 11]]
    assert not rows.batch["response_mask"].any()
    metrics = trajectory.extra["agent_metrics"]
    assert (metrics["status"], metrics["error"], metrics["failures"]) == ("failed", "KeyError: 'x'", {"loop": 1})
    nothing = failed_trajectory(ValueError("y"), CallTrace(), "prompt", 1, [1, 2], 9)
    assert np.asarray(nothing.rows[0].prompt_ids).tolist() == [1, 2]
    assert nothing.rows[0].turns == []
    assert [turn.source for turn in trajectory.rows[0].turns] == ["model", "environment", "model"]
    rewritten = [*calls, answer([7, 8], [12], -3.0)]
    last = failed_trajectory(KeyError("x"), CallTrace(calls=rewritten), "prompt", 0, [1, 2], 9).rows[0]
    assert (list(last.prompt_ids), [list(turn.token_ids) for turn in last.turns]) == ([7, 8], [[12]])


def test_turns_of_the_environment_have_the_names_that_a_loop_gives_them():
    names = {"turn_names": ["search", "user"], "note": 1}
    trajectory = made(AgentLoopOutput([1], [10, 90, 11, 91], [1, 0, 1, 0], extra_fields=names))
    assert [turn.name for turn in trajectory.rows[0].turns] == [None, "search", None, "user"]
    assert trajectory.extra.keys() == {"note", "num_turns", "agent_metrics"}


def test_a_response_that_is_too_long_is_cut_and_a_row_that_no_engine_could_have_is_refused():
    output = AgentLoopOutput([1], [10, 11, 90, 91], [1, 1, 0, 0], turn_rewards=[(4, 1.0)])
    cut = build_trajectory(output, CallTrace(calls=[answer([1], [10, 11], -1.0)]), "prompt", 0, RowLimits(3, 4))
    assert [list(turn.token_ids) for turn in cut.rows[0].turns] == [[10, 11], [90]]
    assert (cut.rows[0].finish_reason, cut.rows[0].turns[1].reward) == ("length", 1.0)
    with pytest.raises(ValueError, match="max_model_len=3"):
        build_trajectory(output, CallTrace(), "prompt", 0, RowLimits(3, 3))


def test_an_aborted_answer_makes_an_aborted_trajectory():
    call = answer([1], [10], -1.0, reason="abort")
    assert made(AgentLoopOutput([1], [10], [1]), call).status == "aborted"


def test_what_a_loop_may_not_return_is_named():
    with pytest.raises(ValueError, match="3 response_mask"):
        AgentLoopOutput([1], [10], [1, 1, 1])
    with pytest.raises(TypeError, match="AgentLoopOutput"):
        made([])


@pytest.mark.parametrize("own", [{"reward_score": float("nan")}, {"turn_rewards": [(1, float("inf"))]}])
def test_a_reward_that_is_no_number_is_refused(own: dict[str, Any]):
    output = AgentLoopOutput([1], [2, 3], [1, 1], **own)
    with pytest.raises(
        ValueError, match=r"reward_score nan, turn_rewards \[\]|reward_score None, turn_rewards \[inf\]"
    ):
        build_trajectory(output, CallTrace(), "u", 0)


def test_a_context_without_room_is_no_row_of_a_failed_trajectory():
    trace = CallTrace(
        calls=[ModelCall([1, 2], Output([3], [0.0], [0], "stop")), ModelCall([9] * 50, Output(finish_reason="length"))]
    )
    (row,) = failed_trajectory(ValueError("x"), trace, "u", 0, [1, 2], 8).rows
    assert (list(row.prompt_ids), row.response_length) == ([1, 2], 1)


def test_a_reward_without_a_token_to_stand_on_is_lost_and_no_failure():
    assert (
        build_trajectory(AgentLoopOutput([1], [], [], turn_rewards=[(0, 1.0)]), CallTrace(), "u", 0).status
        == "finished"
    )
