"""The controller's arithmetic by hand: KL in the reward, rewards kept apart, correction of the rollout's mismatch."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from verl.algos import AdaptiveKLController, FixedKLController
from verl.config import RolloutCorrectionConfig, as_config
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.advantage import RolloutMismatch, apply_kl_penalty, compute_advantage, trajectory_values


def batch_of(scores: list[float], mask: list[list[int]] | None = None, **columns) -> DataProto:
    """Answers of two tokens, the score on the last one."""
    rows = len(scores)
    tensors = {
        "response_mask": torch.tensor(mask or [[1, 1]] * rows),
        "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
    }
    batch = DataProto.from_dict(tensors)
    batch.non_tensor_batch |= {name: object_array(values) for name, values in columns.items()}
    return batch


def with_log_probs(batch: DataProto, distance: list[list[float]]) -> DataProto:
    """The policy's log-probs lie `distance` above the reference's."""
    batch.batch["ref_log_prob"] = torch.full((len(batch), 2), -1.0)
    batch.batch["old_log_probs"] = torch.tensor(distance) - 1.0
    return batch


def test_the_kl_is_taken_off_token_by_token():
    batch = with_log_probs(batch_of([1.0, 0.0], [[1, 1], [1, 0]]), [[0.2, 0.4], [0.6, math.nan]])
    batch, metrics = apply_kl_penalty(batch, FixedKLController(0.5), "kl")
    # 0 - 0.5 · 0.2,  1 - 0.5 · 0.4;   0 - 0.5 · 0.6,  masked
    assert batch.batch["token_level_rewards"].tolist() == [pytest.approx([-0.1, 0.8]), pytest.approx([-0.3, 0.0])]
    # per sequence (0.2 + 0.4) / 2 = 0.3 and 0.6: 0.45
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(0.45),
        "actor/reward_kl_penalty_coeff": 0.5,
    }


def test_rows_that_weigh_nothing_do_not_move_the_controller():
    """KL 0.3 against a target of 0.25: an error of 0.2; one answer over a horizon of 10: × (1 + 0.2 · 1 / 10)."""
    values = []
    for fillers in (0, 3):
        mask = [[1, 1]] + [[0, 0]] * fillers
        batch = with_log_probs(batch_of([1.0] * len(mask), mask), [[0.3, 0.3]] * len(mask))
        controller = AdaptiveKLController(0.1, target_kl=0.25, horizon=10)
        _, metrics = apply_kl_penalty(batch, controller, "kl")
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.3)
        values.append(controller.value)
    assert values == pytest.approx([0.1 * 1.02] * 2)


def test_gdpo_keeps_the_rewards_apart_that_the_configuration_names():
    """As in the estimator's case by hand: (right, 100 × format) of two pairs; only the second pair has an advantage."""
    uids = ["a", "a", "b", "b"]
    batch = batch_of([1.0, 0.0, 1.0, 0.0], uid=uids, format=[0.0, 100.0, 100.0, 0.0])
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    config = {"gdpo": {"reward_keys": ["score", "format"]}}
    apart = compute_advantage(batch, "gdpo", config=config).batch["advantages"][:, 0]
    assert apart.tolist() == pytest.approx([0.0, 0.0, math.sqrt(1.5), -math.sqrt(1.5)], abs=1e-5)
    config["gdpo"]["reward_weights"] = [1.0, 0.0]
    first_only = compute_advantage(batch, "gdpo", config=config).batch["advantages"][:, 0]
    one = math.sqrt(0.5) / math.sqrt(2 / 3)
    assert first_only.tolist() == pytest.approx([one, -one, one, -one], abs=1e-5)


def test_what_the_reward_said_by_name():
    batch = batch_of([1.0, 0.5], acc=[np.True_, False], part=[None, math.nan], note=["x", "y"])
    key = "algorithm.gdpo.reward_keys"
    assert trajectory_values(batch, "score", key).tolist() == [1.0, 0.5]
    assert trajectory_values(batch, "acc", key).tolist() == [1.0, 0.0]
    assert trajectory_values(batch, "part", key).tolist() == [0.0, 0.0], "a sample that could not be scored counts 0"
    named_alike = batch_of([1.0, 0.5], acc=[7, 7], reward_acc=[1.0, 0.0])
    assert trajectory_values(named_alike, "acc", key).tolist() == [1.0, 0.0], "the data has a column of the name too"
    for name in ("note", "formt"):
        with pytest.raises(ValueError, match=rf"reward_keys: .*'{name}' \(available: score"):
            trajectory_values(batch, name, key)


def columns(ratios: list[float]) -> DataProto:
    """One answer whose tokens have these ratios of training to rollout policy."""
    rollout = torch.full((1, len(ratios)), -1.0)
    tensors = {
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + torch.tensor([ratios]).log(),
        "response_mask": torch.ones(1, len(ratios), dtype=torch.long),
    }
    return DataProto.from_dict(tensors)


def correct(ratios: list[float], **config) -> tuple[DataProto, dict[str, float]]:
    batch = columns(ratios)
    metrics = RolloutMismatch(as_config(RolloutCorrectionConfig, config)).correct(batch, columns(ratios))
    return batch, metrics


def test_without_a_correction_the_batch_stays_and_the_mismatch_is_measured():
    batch, metrics = correct([2.0, 1.0])
    assert "rollout_is_weights" not in batch.batch.keys()
    assert batch.batch["response_mask"].tolist() == [[1, 1]]
    assert metrics["rollout_corr/log_prob_diff"] == pytest.approx(math.log(2) / 2)
    assert {"rollout_corr/kl", "rollout_corr/ratio_p50", "rollout_corr/masked_fraction"} <= metrics.keys()


@pytest.mark.parametrize("left", [1.0, 0.5])
def test_the_mismatch_is_to_what_was_drawn_from_and_goes_by_its_old_names_too(left):
    """Engines that differ by 0.5 at one of three tokens, where sampling left this share of the probability."""
    given = columns([1.0, math.exp(0.5), 1.0])
    given.batch["rollout_drawn_log_probs"] = given.batch["rollout_log_probs"] - math.log(left)
    metrics = RolloutMismatch(as_config(RolloutCorrectionConfig, {})).correct(given, given)
    cut = -math.log(left)
    expected = {
        "log_prob_diff_mean": (abs(0.5 - cut) + 2 * cut) / 3,
        "log_prob_diff_p99": max(cut, abs(0.5 - cut)),
        "log_prob_diff_max": max(cut, abs(0.5 - cut)),
        "mismatch_kl": (math.exp(0.5) - 1.5) / 3 + cut,
    }
    assert {name: metrics[f"rollout/{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
    for old, name in (("log_prob_diff_mean", "log_prob_diff"), ("mismatch_kl", "k3_kl")):
        assert metrics[f"rollout/{old}"] == metrics[f"rollout_corr/{name}"]


def test_a_huge_difference_stays_finite_and_masked_tokens_may_hold_anything():
    given = columns([1.0, 1.0])
    given.batch["rollout_log_probs"] = torch.tensor([[-1e4, math.inf]])
    given.batch["response_mask"] = torch.tensor([[1, 0]])
    metrics = RolloutMismatch(as_config(RolloutCorrectionConfig, {})).correct(given, given)
    assert all(math.isfinite(value) for value in metrics.values())


def test_weights_and_mask_reach_the_batch():
    batch, metrics = correct([4.0, 1.0], rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token")
    assert batch.batch["rollout_is_weights"].tolist() == [pytest.approx([2.0, 1.0])]
    assert batch.batch["response_mask"].tolist() == [[0, 1]]
    assert metrics["rollout_corr/masked_fraction"] == 0.5


def test_a_large_difference_is_said_once_with_the_keys_that_help(caplog):
    watch = RolloutMismatch(as_config(RolloutCorrectionConfig, {"warn_log_prob_diff": 0.1}))
    with caplog.at_level(logging.WARNING):
        watch.correct(columns([1.05]), columns([1.05]))
        assert not caplog.records
        watch.correct(columns([2.0]), columns([2.0]))
        watch.correct(columns([2.0]), columns([2.0]))
    (record,) = caplog.records
    assert "differ by 0.693" in record.getMessage()
    assert "rollout_correction.rollout_is=token" in record.getMessage()


@pytest.mark.parametrize(("answers", "ranks", "expected"), [(64, 2, 4), (8, 4, 4), (3, 8, 3), (16, 1, 1)])
@pytest.mark.parametrize("rows_each", [1, 2])
def test_with_bypass_every_sixteenth_answer_is_measured_and_one_per_rank_at_least(answers, ranks, expected, rows_each):
    names = np.repeat([f"a/{number}" for number in range(answers)], rows_each).astype(object)
    batch = DataProto.from_dict({"response_mask": torch.ones(len(names), 1)}, {"trajectory": names})
    chosen = RolloutMismatch(as_config(RolloutCorrectionConfig, {})).sample(batch, ranks)
    assert len(chosen) == len(set(chosen.tolist())) == expected * rows_each, "all rows of those"
    assert len(set(names[chosen])) == expected


def test_the_ratio_of_a_sequence_is_that_of_its_whole_trajectory():
    """Ratios 2 and 2 in one row are 4; in two rows of one trajectory as well, and its tokens stay or go together."""
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 8.0, "rollout_rs": "sequence"}
    for rejected, limits in ((False, {}), (True, {"rollout_rs_threshold": 3.0})):
        one, expected = correct([2.0, 2.0], **correction, **limits)
        rows = DataProto.concat([columns([2.0]), columns([2.0])])
        rows.non_tensor_batch["trajectory"] = object_array(["a/0", "a/0"])
        watch = RolloutMismatch(as_config(RolloutCorrectionConfig, correction | limits))
        assert watch.correct(rows, rows.select()) == pytest.approx(expected)
        assert rows.batch["rollout_is_weights"].tolist() == one.batch["rollout_is_weights"].T.tolist()
        assert rows.batch["response_mask"].tolist() == [[int(not rejected)]] * 2


@pytest.mark.parametrize("asked", [{"rollout_is": "token"}, {"rollout_rs": "token"}, {"bypass_mode": True}])
def test_log_probs_that_a_correction_needs_are_missed_by_name(asked):
    batch = columns([2.0])
    batch.pop(["rollout_log_probs"])
    (key,) = asked
    with pytest.raises(ValueError, match=rf"rollout_correction\.{key} = (token|True): "):
        RolloutMismatch(as_config(RolloutCorrectionConfig, asked)).correct(batch, batch)


def test_reinforce_over_sequences_refuses_a_trajectory_of_several_rows():
    asked = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
    rows = DataProto.concat([columns([2.0]), columns([2.0])])
    watch = RolloutMismatch(as_config(RolloutCorrectionConfig, asked))
    watch.require_one_row_each(rows)
    rows.non_tensor_batch["trajectory"] = object_array(["a/0", "a/0"])
    with pytest.raises(ValueError, match=r"rollout_is = sequence .*bypass_mode=False"):
        watch.require_one_row_each(rows)
    RolloutMismatch(as_config(RolloutCorrectionConfig, asked | {"rollout_is": "token"})).require_one_row_each(rows)


def test_weights_that_nobody_asked_for_are_missed_by_a_warning_only(caplog):
    config = as_config(RolloutCorrectionConfig, {"rollout_is": "token"})
    config.rollout_is_from_auto = True
    batch = columns([2.0])
    batch.pop(["rollout_log_probs"])
    with caplog.at_level(logging.WARNING):
        assert RolloutMismatch(config).correct(batch, batch) == {}
    assert "rollout and training are not compared" in caplog.text
    assert "rollout_is_weights" not in batch.batch.keys()


@pytest.mark.parametrize("by", [{"rollout_is": "token"}, {"bypass_mode": True}])
def test_a_difference_that_is_corrected_is_said_where_it_is_ten_times_as_large(caplog, by):
    """Also by bypass_mode, which none of the other keys goes with."""
    watch = RolloutMismatch(as_config(RolloutCorrectionConfig, {"warn_log_prob_diff": 0.1, **by}))
    with caplog.at_level(logging.WARNING):
        watch.correct(columns([2.0]), columns([2.0]))
        assert not caplog.records
        watch.correct(columns([math.exp(1.1)]), columns([math.exp(1.1)]))
    (record,) = caplog.records
    assert "lower trainer.max_staleness" in record.getMessage()


def test_an_agent_without_log_probs_trains_uncompared_and_that_is_said_once(caplog):
    batch = columns([2.0])
    batch.pop(["rollout_log_probs"])
    watch = RolloutMismatch(as_config(RolloutCorrectionConfig, {}))
    with caplog.at_level(logging.WARNING):
        assert watch.correct(batch, batch) == watch.correct(batch, batch) == {}
    assert [record.getMessage()[:40] for record in caplog.records] == ["rollout and training are not compared: t"]


def with_unknown(ratios: list[float], unknown: list[int]) -> DataProto:
    batch = columns(ratios)
    batch.batch["rollout_log_probs"][0, unknown] = math.nan
    return batch


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_whose_log_prob_nobody_knows_weighs_one_and_is_left_out_of_the_metrics(level):
    asked = {"rollout_is": level, "rollout_is_threshold": 8.0, "rollout_rs": level, "rollout_rs_threshold": 8.0}
    watch = RolloutMismatch(as_config(RolloutCorrectionConfig, asked))
    batch = with_unknown([2.0, 7.0, 3.0], [1])
    metrics = watch.correct(batch, batch.select())
    expected = {"token": [2.0, 1.0, 3.0], "sequence": [6.0, 6.0, 6.0]}[level]
    assert batch.batch["rollout_is_weights"].tolist() == [pytest.approx(expected)]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1]]
    plain = RolloutMismatch(as_config(RolloutCorrectionConfig, {})).correct(columns([2.0, 3.0]), columns([2.0, 3.0]))
    names = plain.keys() & {n for n in metrics if "truncated" not in n and "weight" not in n}
    assert {name: metrics[name] for name in names} == pytest.approx({name: plain[name] for name in names})


def test_with_bypass_the_trainer_computes_what_the_rollout_does_not_know():
    rows = DataProto.concat([columns([2.0, 2.0]) for _ in range(40)])
    rows.batch["rollout_log_probs"][7, 1] = math.nan
    watch = RolloutMismatch(as_config(RolloutCorrectionConfig, {"bypass_mode": True}))
    chosen = watch.sample(rows, ranks=1)
    assert 7 in chosen
    assert len(chosen) == 3
    found = watch.bypass_log_probs(rows, chosen, rows.batch["old_log_probs"][chosen])
    expected = torch.full((40, 2), -1.0)
    expected[7, 1] = rows.batch["old_log_probs"][7, 1]
    torch.testing.assert_close(found, expected)


def test_an_engine_that_does_not_know_what_it_drew_from_is_compared_by_its_whole_distribution():
    given = columns([1.0, 2.0])
    given.batch["rollout_drawn_log_probs"] = torch.full((1, 2), math.nan)
    metrics = RolloutMismatch(as_config(RolloutCorrectionConfig, {"denominator": "drawn"})).correct(given, given)
    assert metrics["rollout_corr/log_prob_diff"] == pytest.approx(math.log(2) / 2)


def test_an_engine_that_knows_only_what_it_drew_from_is_weighed_by_that_and_not_warned_of(caplog):
    given = columns([2.0, 1.0])
    given.batch["rollout_drawn_log_probs"] = given.batch["rollout_log_probs"].clone()
    given.batch["rollout_log_probs"][:] = math.nan
    config = as_config(RolloutCorrectionConfig, {"denominator": "drawn", "rollout_is": "token"})
    metrics = RolloutMismatch(config).correct(given, given)
    assert given.batch["rollout_is_weights"].tolist() == [[2.0, 1.0]]
    assert metrics["rollout_corr/log_prob_diff"] == pytest.approx(math.log(2) / 2)
    assert not caplog.records
    with pytest.raises(ValueError, match=r"rollout_correction\.rollout_is = token"):
        RolloutMismatch(as_config(RolloutCorrectionConfig, {"rollout_is": "token"})).correct(given, given)
