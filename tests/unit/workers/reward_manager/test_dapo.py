"""The dapo manager: the penalty for answers near the length limit, by hand and as a law."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl.workers.reward_manager.dapo import overlong_reward

BUFFER = {"enable": True, "len": 8, "penalty_factor": 0.5, "log": True}


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (12, 0.0),  # 20 - 8: the buffer begins
        (14, 0.5 * (12 - 14) / 8),
        (20, -0.5),
        (23, -0.5),  # over the limit: no lower
    ],
)
def test_the_penalty_by_hand(length, penalty):
    assert overlong_reward(length, max_length=20, buffer=8, factor=0.5) == pytest.approx(penalty)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 100), st.floats(0, 10))
def test_the_penalty_never_falls_below_the_factor_and_never_rises_with_length(length, buffer, rest, factor):
    longest = buffer + rest
    here, longer = (overlong_reward(n, longest, buffer, factor) for n in (length, length + 1))
    assert -factor <= longer <= here <= 0
    assert (here == 0) or length > longest - buffer


@pytest.mark.parametrize("config", [BUFFER, OmegaConf.create(BUFFER)])
def test_the_penalty_of_the_length_in_tokens_is_added_and_told(manager, batch, config):
    made = manager("dapo", max_resp_len=20, overlong_buffer_cfg=config, num_processes=0)
    # One token per character and one for the end: 8, 16 and 20 of them.
    result = made(batch(["#### 72", "xxxxxxxx#### 72", "xxxxxxxxxxxx#### 73"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([1.0, 1.0 - 0.25, 0.0 - 0.5])
    extra = result["reward_extra_info"]
    assert extra["overlong_reward"] == pytest.approx([0.0, -0.25, -0.5])
    assert extra["overlong"] == [0.0, 1.0, 1.0]
    assert extra["acc"] == [1.0, 1.0, 0.0]


def test_a_sample_without_a_score_gets_no_penalty(manager, batch):
    def compute_score(solution_str, ground_truth):
        return {"score": 1.0, "acc": 0.125} if solution_str.startswith("a") else None

    made = manager("dapo", compute_score, max_resp_len=20, overlong_buffer_cfg=BUFFER, num_processes=0, on_error="zero")
    result = made(batch(["a" * 19, "b" * 19]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [0.5, 0.0]
    assert result["reward_extra_info"]["acc"] == [0.125, None]
    assert result["reward_extra_info"]["overlong"] == [1.0, None]


def test_the_penalty_is_logged_only_if_asked_for_and_off_by_default(manager, batch):
    quiet = manager("dapo", max_resp_len=20, overlong_buffer_cfg={**BUFFER, "log": False}, num_processes=0)
    assert "overlong" not in quiet(batch(["#### 72"]), return_dict=True)["reward_extra_info"]
    off = manager("dapo", num_processes=0)
    assert off(batch(["xxxxxxxxxxxxxxx#### 72"])).sum() == 1.0


@pytest.mark.parametrize("longest", [None, 7])
def test_a_buffer_needs_a_limit_that_it_fits_into(manager, longest):
    with pytest.raises(ValueError, match=r"reward_model\.overlong_buffer\.len"):
        manager("dapo", max_resp_len=longest, overlong_buffer_cfg=BUFFER)
