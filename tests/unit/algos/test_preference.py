"""Bradley-Terry by hand, its gradients, and the metrics of a reward model."""

import math

import pytest
import torch

from verl.algos.preference import (
    Pairs,
    calibration_error,
    correlation,
    preference_loss,
    preference_metrics,
    score_gradients,
    validation_metrics,
)


def pairs(*rows):
    """(chosen, rejected, preference, margin, weight)."""
    chosen, rejected, preference, margin, weight = zip(*rows, strict=True)
    return Pairs(
        *map(torch.tensor, (chosen, rejected)), *(torch.tensor(v).float() for v in (preference, margin, weight))
    )


def test_preference_loss_by_hand():
    scores = torch.tensor([2.0, 1.0, -0.5])
    compared = pairs((0, 1, 1.0, 0.0, 1.0), (1, 2, 1.0, 0.5, 3.0), (0, 2, 0.5, 0.0, 2.0))
    first = math.log(1 + math.exp(-1.0))
    second = math.log(1 + math.exp(-(1.5 - 0.5)))
    tie = 0.5 * math.log(1 + math.exp(-2.5)) + 0.5 * math.log(1 + math.exp(2.5))
    assert float(preference_loss(scores, compared)) == pytest.approx((first + 3 * second + 2 * tie) / 6)
    centred = 0.1 * (3.0**2 + 3 * 0.5**2 + 2 * 1.5**2) / 6
    assert float(preference_loss(scores, compared, 0.1)) == pytest.approx((first + 3 * second + 2 * tie) / 6 + centred)


@pytest.mark.parametrize("preference", [1.0, 0.7, 0.5, 0.2])
def test_a_pair_and_its_mirror_image_cost_the_same_and_a_tie_has_no_margin(preference):
    scores = torch.tensor([0.8, 0.1])
    as_given = preference_loss(scores, pairs((0, 1, preference, 1.5, 1)))
    mirrored = preference_loss(scores, pairs((1, 0, 1 - preference, 1.5, 1)))
    assert float(as_given) == pytest.approx(float(mirrored))
    if preference == 0.5:
        assert float(as_given) == pytest.approx(float(preference_loss(scores, pairs((0, 1, 0.5, 0, 1)))))


def test_score_gradients_by_hand():
    """d/dr_c of -log sigmoid(r_c - r_r - m) is -sigmoid(m - (r_c - r_r)); an answer of two pairs has the sum."""
    gradients = score_gradients(torch.tensor([2.0, 1.0, 0.0]), pairs((0, 1, 1, 0, 1), (0, 2, 1, 1, 1)))
    each = 0.5 / (1 + math.exp(1.0))
    assert gradients.tolist() == pytest.approx([-2 * each, each, each])


def test_losses_of_some_pairs_add_up_to_that_of_all():
    scores = torch.tensor([2.0, 1.0, -0.5])
    compared = pairs((0, 1, 1, 0, 1), (1, 2, 1, 0.5, 3), (0, 2, 0.5, 0, 2))
    some = torch.tensor([True, False, True])
    parts = [preference_loss(scores, compared[mask], 0.1, weight=6.0) for mask in (some, ~some)]
    assert float(sum(parts)) == pytest.approx(float(preference_loss(scores, compared, 0.1)))


def test_a_pair_without_weight_has_no_say_and_none_at_all_is_no_loss():
    scores = torch.tensor([0.3, -1.0, 4.0])
    both, one, none = pairs((0, 1, 1, 0, 2), (1, 2, 1, 0, 0)), pairs((0, 1, 1, 0, 2)), pairs((0, 1, 1, 0, 0))
    assert float(preference_loss(scores, both, 0.01)) == pytest.approx(float(preference_loss(scores, one, 0.01)))
    assert score_gradients(scores, both, 0.01).tolist() == pytest.approx(score_gradients(scores, one, 0.01).tolist())
    assert float(preference_loss(scores, none)) == 0
    assert score_gradients(scores, none, 0.0).tolist() == [0, 0, 0]


def test_pairs_of_batches_join_into_those_of_all_answers():
    a, b = pairs((0, 1, 1, 0, 1)), pairs((1, 0, 0.5, 2, 3))
    joined = Pairs.concat([a, b], [2, 2])
    assert joined.chosen.tolist() == [0, 3]
    assert joined.rejected.tolist() == [1, 2]
    assert joined.margin.tolist() == [0, 2]


def test_accuracy_leaves_ties_out_and_counts_equal_scores_half():
    scores = torch.tensor([1.0, 0.0, 1.0])
    compared = pairs((0, 1, 1, 0, 1), (1, 2, 1, 0, 7), (0, 2, 1, 0, 1), (0, 1, 0.5, 0, 9), (1, 0, 0.2, 0, 1))
    found = preference_metrics(scores, compared)
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found["margin"] == pytest.approx((1 - 1 + 0 + 1) / 4)


def test_calibration_error_by_hand():
    """Two at confidence 0.75, one right: 0.25 apart; one at 0.95 (the second is better) that is right: 0.05."""
    given, truth = torch.tensor([0.75, 0.25, 0.05]), torch.tensor([1.0, 1.0, 0.0])
    assert calibration_error(given, truth) == pytest.approx((0.5 + 0.05) / 3)
    assert calibration_error(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])) == 0


def test_a_model_that_only_measures_length_is_told_by_its_metrics():
    lengths = torch.tensor([10, 5, 7, 9])
    found = validation_metrics(lengths.float() * 2 - 3, lengths, pairs((0, 1, 1, 0, 1), (2, 3, 1, 0, 1)), 0.0)
    assert found["length_correlation"] == pytest.approx(1.0)
    assert found["longer_is_better"] == found["accuracy"] == 0.5
    assert correlation(torch.ones(3), torch.tensor([1.0, 2, 3])) == 0
