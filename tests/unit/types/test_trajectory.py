"""Turns, rows and trajectories as plain data."""

from __future__ import annotations

import pytest

from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn


def test_an_engines_output_is_a_model_turn_with_all_it_says():
    output = Output([5, 6], [-0.1, -0.2], [3, 4], "stop", [-0.3, -0.4], [-0.5, -0.6])
    assert Turn.sampled(output) == Turn("model", [5, 6], [-0.1, -0.2], [3, 4], "stop", drawn_log_probs=[-0.5, -0.6])
    assert Turn.sampled(Output([5], [-0.1], [3])).drawn_log_probs is None, "the engine did not say"


@pytest.mark.parametrize("field", ["log_probs", "versions", "drawn_log_probs"])
def test_a_turn_has_one_value_per_token_or_none(field):
    with pytest.raises(ValueError, match=rf"^turn: 2 tokens .*\b1 {field}\b"):
        Turn("model", [5, 6], **{field: [1]})


def test_a_row_ends_as_its_last_model_turn():
    answer, result = Turn("model", [1], finish_reason="length"), Turn("environment", [2, 3])
    assert Row([9], [Turn("model", [1], finish_reason="stop"), result, answer, result]).finish_reason == "length"
    assert Row([9], [result, answer]).response_length == 3
    assert Row([9], [result]).finish_reason is None


def test_a_trajectory_is_named_by_its_prompt_and_its_number():
    assert Trajectory("u-7", 3, []).name == "u-7/3"
