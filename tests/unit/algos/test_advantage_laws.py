"""Laws that hold for every registered estimator, over random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos import estimate_advantages
from verl.config import names

GROUPED = tuple(name for name, row in names.ADV_ESTIMATORS.items() if row.uses_groups)
# The last step of these divides by a spread over the whole batch.
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
EXAMPLES = settings(max_examples=8)

seeds = st.integers(0, 2**31)
every_estimator = pytest.mark.parametrize("name", names.ADV_ESTIMATORS)


def random_batch(seed: int, rows: int = 12, width: int = 9) -> dict:
    """Groups of different sizes in any order, ragged responses with observations between turns, dense rewards."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=rng)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=rng) < 0.8)
    mask[:, 0] = True
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    return {
        "token_level_rewards": draw(rows, width),
        "values": draw(rows, width),
        "response_mask": mask.long(),
        "index": np.array([f"uid-{i}" for i in torch.randint(0, 4, (rows,), generator=rng)], dtype=object),
        "reward_baselines": draw(rows),
        "gamma": 0.9,
        "lam": 0.8,
    }


def run(name: str, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return estimate_advantages(name, **batch)


def rows_of(batch: dict, order: torch.Tensor) -> dict:
    taken = {k: v[order] for k, v in batch.items() if isinstance(v, torch.Tensor)}
    return batch | taken | {"index": batch["index"][order.numpy()]}


def assert_same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...], tolerance: float = 1e-9) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_estimator
@EXAMPLES
@given(seed=seeds)
def test_the_order_of_the_rows_does_not_matter(name, seed):
    batch = random_batch(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed + 1))
    assert_same([part[order] for part in run(name, batch)], run(name, rows_of(batch, order)))


@every_estimator
@EXAMPLES
@given(seed=seeds, padding=st.integers(1, 6))
def test_the_amount_of_padding_does_not_matter(name, seed, padding):
    batch = random_batch(seed)
    padded = dict(batch)
    for key in ("token_level_rewards", "values", "response_mask"):
        padded[key] = torch.nn.functional.pad(batch[key], (0, padding))
    advantages, returns = run(name, padded)
    assert not advantages[:, -padding:].any()
    assert_same((advantages[:, :-padding], returns[:, :-padding]), run(name, batch))


@every_estimator
@EXAMPLES
@given(seed=seeds, at=st.integers(0, 9), garbage=st.sampled_from([0.0, 7.0, float("nan"), float("inf")]))
def test_observations_inserted_between_turns_change_no_model_token(name, seed, at, garbage):
    batch = random_batch(seed)

    def insert(values, filler):
        middle = torch.full((12, 3), filler, dtype=values.dtype)
        return torch.cat([values[:, :at], middle, values[:, at:]], dim=1)

    with_tool = dict(batch)
    for key in ("token_level_rewards", "values"):
        with_tool[key] = insert(batch[key], garbage)
    with_tool["response_mask"] = insert(batch["response_mask"], 0)
    advantages, returns = run(name, with_tool)
    assert not advantages[:, at : at + 3].any()
    cut = [torch.cat([part[:, :at], part[:, at + 3 :]], dim=1) for part in (advantages, returns)]
    assert_same(cut, run(name, batch))


@every_estimator
@EXAMPLES
@given(seed=seeds, garbage=st.sampled_from([3.0, float("nan"), float("inf"), float("-inf")]))
def test_masked_tokens_contribute_nothing_whatever_they_hold(name, seed, garbage):
    batch = random_batch(seed)
    spoilt = dict(batch)
    for key in ("token_level_rewards", "values"):
        spoilt[key] = batch[key].masked_fill(batch["response_mask"] == 0, garbage)
    results = run(name, spoilt)
    assert_same(results, run(name, batch))
    assert not results[0][batch["response_mask"] == 0].any()


@every_estimator
@EXAMPLES
@given(seed=seeds)
def test_filler_rows_without_a_model_token_weigh_nothing(name, seed):
    batch = random_batch(seed)
    filled = {k: torch.cat([v, v[:3]]) for k, v in batch.items() if isinstance(v, torch.Tensor)}
    filled["response_mask"][12:] = 0
    filled["index"] = np.concatenate([batch["index"], batch["index"][:3]])
    advantages, returns = run(name, batch | filled)
    assert not advantages[12:].any()
    assert_same((advantages[:12], returns[:12]), run(name, batch))


@pytest.mark.parametrize("name", GROUPED)
@EXAMPLES
@given(seed=seeds, score=st.floats(-3, 3))
def test_equal_rewards_in_a_group_give_zero_advantage(name, seed, score):
    batch = random_batch(seed)
    rewards = torch.zeros_like(batch["token_level_rewards"])
    rewards[:, 0] = score  # every row has a model token there
    rewards = rewards.float() if seed % 2 else rewards
    advantages, _ = run(name, batch | {"token_level_rewards": rewards})
    assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize("name", GROUPED)
@EXAMPLES
@given(seed=seeds, shift=st.floats(-10, 10))
def test_a_constant_added_to_every_score_changes_nothing(name, seed, shift):
    batch = random_batch(seed)
    shifted = batch["token_level_rewards"].clone()
    shifted[:, 0] += shift
    assert_same(run(name, batch), run(name, batch | {"token_level_rewards": shifted}), 1e-6)


@EXAMPLES
@given(seed=seeds, shift=st.floats(-10, 10))
def test_remax_is_about_the_distance_from_the_greedy_answer(seed, shift):
    """A constant added to every score and to the greedy one changes nothing; to the greedy one alone, it is lost."""
    batch = random_batch(seed)
    # The constant on the last model token: it is in the return of every token before it.
    last = batch["response_mask"].cumsum(-1).argmax(-1)
    shifted = batch["token_level_rewards"].clone()
    shifted[torch.arange(12), last] += shift
    baselines = batch["reward_baselines"] + shift
    both = run("remax", batch | {"token_level_rewards": shifted, "reward_baselines": baselines})
    assert_same([both[0]], [run("remax", batch)[0]])
    alone = run("remax", batch | {"reward_baselines": baselines})
    assert_same([alone[0]], [run("remax", batch)[0] - shift * batch["response_mask"].double()])


@EXAMPLES
@given(seed=seeds, shift=st.floats(-10, 10))
def test_without_a_discount_reinforce_plus_plus_ignores_a_constant_in_every_score(seed, shift):
    batch = random_batch(seed) | {"gamma": 1.0}
    last = batch["response_mask"].cumsum(-1).argmax(-1)
    shifted = batch["token_level_rewards"].clone()
    shifted[torch.arange(12), last] += shift
    before, after = (run("reinforce_plus_plus", given) for given in (batch, batch | {"token_level_rewards": shifted}))
    assert_same([before[0]], [after[0]], 1e-6)
    assert_same([before[1] + shift * batch["response_mask"].double()], [after[1]], 1e-6)


@every_estimator
@EXAMPLES
@given(seed=seeds, factor=st.sampled_from([0.25, 2.0, 10.0]))
def test_scaling_rewards_scales_advantages_unless_they_are_normalised(name, seed, factor):
    # An epsilon that is small beside any spread here: else it is what remains of the scale.
    batch = random_batch(seed) | {"norm_adv_by_std_in_grpo": False, "epsilon": 1e-10}
    scaled = {key: batch[key] * factor for key in ("token_level_rewards", "values", "reward_baselines")}
    expected = 1.0 if name in WHITENED else factor
    assert_same([run(name, batch)[0] * expected], [run(name, batch | scaled)[0]], 2e-5)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk"])
@EXAMPLES
@given(seed=seeds, factor=st.sampled_from([0.25, 2.0, 10.0]))
def test_dividing_by_the_std_makes_the_scale_of_rewards_irrelevant(name, seed, factor):
    batch = random_batch(seed) | {"epsilon": 0.0}
    # Groups of one have the spread 0: 0 / 0 without an epsilon.
    batch["index"] = np.array(["a", "b"] * 6, dtype=object)
    scaled = {"token_level_rewards": batch["token_level_rewards"] * factor}
    assert_same(run(name, batch), run(name, batch | scaled))


@every_estimator
def test_float32_and_half_precision_come_back_as_float32_and_float64_as_float64(name):
    batch = random_batch(0)
    for dtype, expected in [(torch.float64, torch.float64), (torch.float32, torch.float32)]:
        typed = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
        assert {part.dtype for part in run(name, typed)} == {expected}
    half = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    assert {part.dtype for part in run(name, half)} == {torch.float32}


@every_estimator
def test_inputs_are_left_as_they_were(name):
    batch = random_batch(1)
    before = {k: v.clone() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    run(name, batch)
    assert all(torch.equal(batch[key], value) for key, value in before.items())
