"""Truncated importance sampling, masking and mismatch metrics, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl.algos.rollout_correction import correct_rollout, mismatch_metrics
from verl.config import RolloutCorrectionConfig, as_config

NAN = float("nan")
# Ratios of training to rollout policy; row 0 in all 4 · 0.5 = 2, row 1 in all 0.5 · 0.5 · 0.5 = 0.125.
RATIOS = torch.tensor([[4.0, 0.5, NAN], [0.5, 0.5, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ROLLOUT = torch.tensor([[-1.0, -2.0, NAN], [-1.0, -2.0, -3.0]], dtype=torch.float64)
OLD = ROLLOUT + RATIOS.log()


def correct(**config):
    return correct_rollout(OLD, ROLLOUT, MASK, config)


def test_without_a_correction_the_mismatch_is_still_measured():
    result = correct()
    assert result.weights is None
    assert torch.equal(result.response_mask, MASK)
    assert result.metrics["rollout_corr/masked_fraction"] == 0.0
    # rollout - training log-probs: -log 4 + 4 · log 2 over five tokens
    assert result.metrics["rollout_corr/kl"] == pytest.approx((-math.log(4) + 4 * math.log(2)) / 5)
    assert result.metrics["rollout_corr/log_prob_diff"] == pytest.approx((math.log(4) + 4 * math.log(2)) / 5)
    assert result.metrics["rollout_corr/log_prob_diff_max"] == pytest.approx(math.log(4))
    # k3 under the rollout: ratio - 1 - log ratio
    k3 = (4 - 1 - math.log(4)) + 4 * (0.5 - 1 + math.log(2))
    assert result.metrics["rollout_corr/k3_kl"] == pytest.approx(k3 / 5)
    assert result.metrics["rollout_corr/ratio_mean"] == pytest.approx((4 + 4 * 0.5) / 5)
    assert result.metrics["rollout_corr/sequence_ratio_mean"] == pytest.approx((2 + 0.125) / 2)
    assert result.metrics["rollout_corr/ratio_p01"] == pytest.approx(0.5)
    assert result.metrics["rollout_corr/ratio_p50"] == pytest.approx(0.5)
    assert result.metrics["rollout_corr/ratio_p99"] == pytest.approx(4.0)
    # (Σ w)² / (n Σ w²) = 6² / (5 · 17)
    assert result.metrics["rollout_corr/effective_share"] == pytest.approx(36 / 85)


def of_top_two(denominator: str, **config):
    """Probabilities .5 .3 .2, of which top-k 2 leaves 5/8 and 3/8: eight tokens, each as often as it is drawn."""
    tokens = torch.tensor([[0] * 5 + [1] * 3])
    whole, left = torch.tensor([0.5, 0.3, 0.2]).double().log(), torch.tensor([5 / 8, 3 / 8]).double().log()
    mask = torch.ones_like(tokens)
    config |= {"denominator": denominator}
    return tokens, correct_rollout(whole[tokens], whole[tokens], mask, config, left[tokens])


@pytest.mark.parametrize("denominator", ["full", "drawn"])
def test_what_sampling_cuts_off_is_measured_whatever_the_denominator(denominator):
    """Both engines agree: all of the mismatch is KL(drawn ‖ whole) = -log of the .8 that are left."""
    metrics = of_top_two(denominator)[1].metrics
    for name in ("kl", "k3_kl", "truncation_kl", "log_prob_diff", "log_prob_diff_max"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(-math.log(0.8)), name
    assert metrics["rollout_corr/engine_log_prob_diff"] == 0.0
    assert metrics["rollout_corr/ratio_mean"] == pytest.approx(0.8)
    assert metrics["rollout_corr/ratio_p50"] == pytest.approx(0.8)


def test_weights_against_the_drawn_distribution_give_the_policys_expectation():
    """Σ drawn(a) · w(a) · f(a) over all a, exactly: Σ π(a) f(a) of what can be drawn."""
    tokens, corrected = of_top_two("drawn", rollout_is="token")
    f = torch.tensor([7.0, -3.0, 100.0]).double()
    assert (corrected.weights * f[tokens]).mean().item() == pytest.approx(0.5 * 7 + 0.3 * -3)
    tokens, plain = of_top_two("full", rollout_is="token")
    assert (plain.weights * f[tokens]).mean().item() == pytest.approx(5 / 8 * 7 + 3 / 8 * -3), "no correction at all"


def test_masks_follow_the_denominator_too():
    rule = {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.9}
    assert of_top_two("drawn", **rule)[1].response_mask.sum() == 0
    assert of_top_two("full", **rule)[1].response_mask.sum() == 8


def test_token_level_truncated_importance_sampling():
    result = correct(rollout_is="token", rollout_is_threshold=2.0)
    assert result.weights.tolist() == [pytest.approx([2.0, 0.5, 0.0]), pytest.approx([0.5, 0.5, 0.5])]
    assert result.metrics["rollout_corr/truncated_fraction"] == pytest.approx(1 / 5)
    assert result.metrics["rollout_corr/weight_mean"] == pytest.approx((2 + 4 * 0.5) / 5)
    assert torch.equal(result.response_mask, MASK)


def test_sequence_level_truncated_importance_sampling():
    result = correct(rollout_is="sequence", rollout_is_threshold=1.5)
    assert result.weights.tolist() == [pytest.approx([1.5, 1.5, 0.0]), pytest.approx([0.125] * 3)]
    assert result.metrics["rollout_corr/truncated_fraction"] == pytest.approx(2 / 5)


def test_masking_tokens():
    result = correct(rollout_rs="token", rollout_rs_threshold=3.0, rollout_rs_threshold_lower=0.4)
    assert result.response_mask.tolist() == [[0, 1, 0], [1, 1, 1]]
    assert result.response_mask.dtype == MASK.dtype
    assert result.metrics["rollout_corr/masked_fraction"] == pytest.approx(1 / 5)
    assert result.metrics["rollout_corr/masked_sequence_fraction"] == 0.0


def test_masking_sequences_by_the_product_of_their_ratios():
    result = correct(rollout_rs="sequence", rollout_rs_threshold=4.0)
    # 2 is within [1/4, 4], 0.125 is not
    assert result.response_mask.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert result.metrics["rollout_corr/masked_fraction"] == pytest.approx(3 / 5)
    assert result.metrics["rollout_corr/masked_sequence_fraction"] == pytest.approx(1 / 2)


def test_masking_sequences_by_the_geometric_mean_of_their_ratios():
    # √2 = 1.414 and 0.125^(1/3) = 0.5
    wide = correct(rollout_rs="geometric", rollout_rs_threshold=2.1)
    assert wide.response_mask.tolist() == MASK.tolist()
    narrow = correct(rollout_rs="geometric", rollout_rs_threshold=1.4, rollout_rs_threshold_lower=0.4)
    assert narrow.response_mask.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_thresholds_default_to_those_of_the_weights():
    # tokens within [1 / 2.5, 2.5] stay
    result = correct(rollout_is="token", rollout_is_threshold=2.5, rollout_rs="token")
    assert result.response_mask.tolist() == [[0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create, lambda c: as_config(RolloutCorrectionConfig, c)])
def test_any_kind_of_configuration_is_accepted(wrap):
    result = correct_rollout(OLD, ROLLOUT, MASK, wrap({"rollout_is": "token", "rollout_is_threshold": 3.0}))
    assert result.weights[0, 0] == 3.0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_equal_policies_have_weight_one_mask_nothing_and_show_no_mismatch(seed):
    rng = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(3, 5, generator=rng)
    mask = (torch.rand(3, 5, generator=rng) < 0.5).long()
    for level in ("token", "sequence"):
        result = correct_rollout(log_probs, log_probs, mask, {"rollout_is": level, "rollout_rs": level})
        assert torch.equal(result.weights, mask.float())
        assert torch.equal(result.response_mask, mask)
        assert result.metrics["rollout_corr/log_prob_diff"] == 0.0


def test_an_empty_batch_measures_zero_and_not_nan():
    metrics = mismatch_metrics(OLD, ROLLOUT, torch.zeros_like(MASK))
    assert all(math.isfinite(value) for value in metrics.values())


def test_quantiles_of_many_tokens_are_read_from_an_even_sample():
    rows = torch.linspace(-1, 1, 1500 * 1000).view(1500, 1000)
    metrics = mismatch_metrics(rows, torch.zeros_like(rows), torch.ones_like(rows))
    assert metrics["rollout_corr/ratio_p50"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["rollout_corr/ratio_p99"] == pytest.approx(math.exp(0.98), abs=1e-2)


@pytest.mark.parametrize(
    ("level", "threshold", "weights", "outside"),
    [
        ("token", "0.6_2.0", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 1.0),
        ("token", "0.4_5.0", [[4.0, 0.5, 0.0], [0.5, 0.5, 0.5]], 0.0),
        ("token", "0.4_3.0", [[0.0, 0.5, 0.0], [0.5, 0.5, 0.5]], 1 / 5),
        ("sequence", "0.5_2.0", [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]], 3 / 5),
    ],
)
def test_two_sided_weights_are_the_ratio_within_and_nothing_outside(level, threshold, weights, outside):
    result = correct(rollout_is=level, rollout_is_threshold=threshold)
    assert result.weights.tolist() == [pytest.approx(row) for row in weights]
    assert result.metrics["rollout_corr/truncated_fraction"] == pytest.approx(outside)
    assert torch.equal(result.response_mask, MASK), "weights of 0 are no mask: the loss is still a mean over all"


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        ("token", (2 + 4 * 0.5) / 5),  # truncated at 2, over five tokens
        ("sequence", (2 + 0.125) / 2),  # over two sequences
    ],
)
def test_weights_of_a_batch_have_a_mean_of_one(level, mean):
    plain = correct(rollout_is=level)
    result = correct(rollout_is=level, rollout_is_batch_normalize=True)
    assert torch.allclose(result.weights, plain.weights / mean)


def test_the_mean_is_over_what_rejection_leaves():
    """Tokens of 4 (truncated at 2) and 0.5, of which the first is masked: all that stay have 0.5."""
    result = correct(
        rollout_is="token", rollout_is_batch_normalize=True, rollout_rs="token_k1", rollout_rs_threshold=3.0
    )
    assert result.weights[result.response_mask.bool()].tolist() == pytest.approx([1.0] * 4)
    assert result.metrics["rollout_corr/weight_mean"] == pytest.approx((2 + 4 * 0.5) / 5), "before"


def test_a_sequence_is_judged_by_the_tokens_that_are_known():
    """One token with ratio e among three with unknown log-probs: the mean is e, not its root."""
    rollout = torch.tensor([[-2.0, NAN, NAN, NAN]])
    rule = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.5}
    result = correct_rollout(torch.full((1, 4), -1.0), rollout, torch.ones(1, 4), rule)
    assert result.response_mask.sum() == 0


def test_products_beyond_any_number_are_still_outside():
    old = torch.full((1, 45), -1.0)
    rule = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "1e-9_1e9"}
    assert correct_rollout(old, old - 1.0, torch.ones(1, 45), rule).response_mask.sum() == 0
    assert correct_rollout(old, old - 0.1, torch.ones(1, 45), rule).response_mask.sum() == 45


def test_weights_that_are_all_nothing_stay_so():
    result = correct(rollout_is="token", rollout_is_threshold="0.9_1.1", rollout_is_batch_normalize=True)
    assert result.weights.tolist() == [[0.0] * 3] * 2


LOG2 = math.log(2)
# Of the tokens with ratio 4 and 1/2: (log r)² / 2 and r - 1 - log r.
K2 = {4.0: (2 * LOG2) ** 2 / 2, 0.5: LOG2**2 / 2}
K3 = {4.0: 3 - 2 * LOG2, 0.5: LOG2 - 0.5}
ALL, FIRST, SECOND, NOT_4 = MASK.tolist(), [[1, 1, 0], [0, 0, 0]], [[0, 0, 0], [1, 1, 1]], [[0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("rule", "threshold", "kept"),
    [
        ("token_k1", "0.4_3.0", NOT_4),
        ("token_k1", "3.0", NOT_4),  # [1/3, 3]
        ("token_k2", K2[4.0] - 0.01, NOT_4),
        ("token_k2", K2[4.0] + 0.01, ALL),
        ("token_k3", K3[4.0] - 0.01, NOT_4),
        ("token_k3", K3[0.5] - 0.01, [[0, 0, 0], [0, 0, 0]]),
        ("seq_sum_k1", "0.5_2.0", FIRST),  # the products 2 and 1/8
        ("seq_mean_k1", "0.4_1.4", SECOND),  # the geometric means √2 and 1/2
        ("seq_sum_k2", K2[4.0] + K2[0.5] - 0.01, SECOND),
        ("seq_sum_k2", 3 * K2[0.5] - 0.01, [[0, 0, 0], [0, 0, 0]]),
        ("seq_mean_k2", (K2[4.0] + K2[0.5]) / 2 - 0.01, SECOND),
        ("seq_sum_k3", K3[4.0] + K3[0.5] - 0.01, SECOND),
        ("seq_mean_k3", (K3[4.0] + K3[0.5]) / 2 + 0.01, ALL),
        ("seq_max_k2", K2[4.0] - 0.01, SECOND),
        ("seq_max_k3", K3[0.5] - 0.01, [[0, 0, 0], [0, 0, 0]]),
        ("token_k1,seq_sum_k1", "3.0", [[0, 1, 0], [0, 0, 0]]),  # one threshold for all
        ("token_k1, seq_max_k2", f"0.4_5.0,{K2[4.0] - 0.01}", SECOND),  # or one for each
    ],
)
def test_every_kind_of_rejection_by_hand(rule, threshold, kept):
    assert correct(rollout_rs=rule, rollout_rs_threshold=threshold).response_mask.tolist() == kept


@pytest.mark.parametrize(
    ("old", "new"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_the_shorter_names_are_the_same(old, new):
    for threshold in ("1.3", "2.1", "3.0", "9.0"):
        one, other = (correct(rollout_rs=name, rollout_rs_threshold=threshold).response_mask for name in (old, new))
        assert torch.equal(one, other)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"\b3\b.*\b2\b"):
        correct(rollout_rs="token", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=3.0)
    with pytest.raises(ValueError, match=r"(?s)'word'.*token_k1.*token_k2"):
        correct(rollout_rs="word")
