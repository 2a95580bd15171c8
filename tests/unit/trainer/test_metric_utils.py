"""Metrics of a step: worked values, nothing from masked tokens or fillers."""

import math

import pytest
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    reduce_metrics,
)

# Two rows of 2 + 3 tokens (row 0: one prompt token, a tool token in its answer; row 1: one answer token).
PROMPT_MASK = [[0, 1], [1, 1]]
REAL_RESPONSE = [[1, 1, 1], [1, 0, 0]]
RESPONSE_MASK = [[1, 0, 1], [1, 0, 0]]


def make_batch(**extra) -> DataProto:
    tensors = {
        "attention_mask": torch.cat([torch.tensor(PROMPT_MASK), torch.tensor(REAL_RESPONSE)], dim=1),
        "response_mask": torch.tensor(RESPONSE_MASK),
        "token_level_scores": torch.tensor([[0.0, 0, 1], [0.5, 0, 0]]),
        "token_level_rewards": torch.tensor([[0.25, 0, 0.5], [0.25, 0, 0]]),
        "advantages": torch.tensor([[1.0, 9, 3], [-4, 9, 9]]),
        "returns": torch.tensor([[1.0, 9, 2], [3, 9, 9]]),
        "values": torch.tensor([[1.0, 9, 1], [1, 9, 9]]),
        "old_log_probs": torch.tensor([[-1.0, 9, -2], [-3, 9, 9]]),
        "ref_log_prob": torch.tensor([[-1.5, 9, -2], [-4, 9, 9]]),
    }
    tensors |= extra
    return DataProto.from_dict({name: value for name, value in tensors.items() if value is not None})


def test_worked_example():
    metrics = compute_data_metrics(make_batch())
    expected = {
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/score/min": 0.5,
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 0.75,
        "critic/rewards/min": 0.25,
        "reward/mean": 0.5,
        "critic/advantages/mean": 0.0,
        "critic/advantages/max": 3.0,
        "critic/advantages/min": -4.0,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 3.0,
        "critic/returns/min": 1.0,
        "critic/values/mean": 1.0,
        "critic/values/max": 1.0,
        "critic/values/min": 1.0,
        "critic/vf_explained_var": 0.0,
        "kl/mean": 0.5,
        "response_length/mean": 2.0,
        "response_length/max": 3.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 1.5,
        "prompt_length/max": 2.0,
        "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 0.5,
    }
    assert metrics == pytest.approx(expected, abs=2e-5)
    assert all(type(value) is float for value in metrics.values())


def test_optional_columns_bring_their_metrics_or_none():
    batch = make_batch(values=None, ref_log_prob=None, token_level_rewards=None)
    metrics = compute_data_metrics(batch)
    assert not [name for name in metrics if name.startswith(("critic/values", "critic/vf", "kl/"))]
    assert metrics["reward/mean"] == metrics["critic/score/mean"] == 0.75
    assert "critic/values/mean" not in compute_data_metrics(make_batch(), use_critic=False)


def test_a_critic_that_is_right_explains_all_variance():
    returns = make_batch().batch["returns"]
    assert compute_data_metrics(make_batch(values=returns))["critic/vf_explained_var"] == pytest.approx(1.0)


def test_clip_ratio_follows_the_configured_limit():
    batch = make_batch()
    batch.meta_info = {"max_response_length": 4, "max_prompt_length": 1}
    metrics = compute_data_metrics(batch)
    assert (metrics["response_length/clip_ratio"], metrics["prompt_length/clip_ratio"]) == (0.0, 1.0)


def test_an_answer_is_clipped_where_it_was_cut_not_where_it_is_long():
    """Row 0 ended by itself at the limit; row 1 was cut after a token, by a limit of its own."""
    batch = make_batch()
    batch.non_tensor_batch["finish_reason"] = object_array(["stop", "length"])
    batch.meta_info = {"max_response_length": 3}
    assert compute_data_metrics(batch)["response_length/clip_ratio"] == 0.5
    batch.non_tensor_batch["finish_reason"] = object_array(["stop", "stop"])
    assert compute_data_metrics(batch)["response_length/clip_ratio"] == 0.0
    batch.batch["response_mask"][1] = 0  # a filler, or a sample that could not be scored
    batch.non_tensor_batch["finish_reason"] = object_array(["stop", "length"])
    assert compute_data_metrics(batch)["response_length/clip_ratio"] == 0.0


def test_masked_tokens_and_filler_rows_change_nothing():
    clean = make_batch()
    filled = DataProto.concat([clean, clean])
    filled.batch["response_mask"][2:] = 0
    off = filled.batch["response_mask"] == 0
    for name in ("token_level_scores", "token_level_rewards", "advantages", "returns", "values"):
        filled.batch[name][off] = float("nan")
    for name in ("old_log_probs", "ref_log_prob"):
        filled.batch[name][off] = float("inf")
    timing = {"gen": 2.0, "step": 4.0}
    assert compute_data_metrics(filled) == pytest.approx(compute_data_metrics(clean))
    assert compute_timing_metrics(filled, timing) == compute_timing_metrics(clean, timing)
    assert compute_throughout_metrics(filled, timing, 2) == compute_throughout_metrics(clean, timing, 2)


def test_a_batch_without_sampled_tokens_gives_numbers():
    batch = make_batch(response_mask=torch.zeros(2, 3, dtype=torch.long))
    metrics = compute_data_metrics(batch) | compute_timing_metrics(batch, {"gen": 1.0, "step": 0.0})
    metrics |= compute_throughout_metrics(batch, {"step": 0.0}, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward/mean"] == metrics["critic/vf_explained_var"] == metrics["perf/throughput"] == 0.0


def test_timing_and_throughput():
    timing = {"gen": 2.0, "update_actor": 7.0, "testing": 5.0, "save_checkpoint": 1.0, "step": 14.0}
    metrics = compute_timing_metrics(make_batch(), timing)
    assert {name: metrics[f"timing_s/{name}"] for name in timing} == timing
    assert metrics["timing_per_token_ms/gen"] == 2000.0 / 4
    assert metrics["timing_per_token_ms/update_actor"] == 7000.0 / 7
    assert not {"timing_per_token_ms/testing", "timing_per_token_ms/save_checkpoint"} & metrics.keys()
    assert compute_throughout_metrics(make_batch(), timing, n_gpus=2) == {
        "perf/total_num_tokens": 7.0,
        "perf/time_per_step": 14.0,
        "perf/throughput": 0.25,
    }
    with pytest.raises(ValueError, match="n_gpus"):
        compute_throughout_metrics(make_batch(), timing, n_gpus=0)


def test_a_batch_by_reference_gives_the_same_from_the_columns_it_needs(ray_cluster):
    from verl.single_controller.ray.batch_ref import BatchRef
    from verl.single_controller.ray.column_store import traffic

    batch = make_batch(
        prompts=torch.tensor([[0, 5], [6, 7]]),
        responses=torch.tensor([[1, 2, 3], [4, 0, 0]]),
        never_needed=torch.zeros(2, 100_000),
    )
    stored = BatchRef.from_dataproto(batch)
    before = traffic.fetched
    timing = {"gen": 1.0, "step": 2.0}
    metrics = compute_data_metrics(stored) | compute_timing_metrics(stored, timing)
    metrics |= compute_throughout_metrics(stored, timing, 1)
    expected = compute_data_metrics(batch) | compute_timing_metrics(batch, timing)
    assert metrics == pytest.approx(expected | compute_throughout_metrics(batch, timing, 1))
    assert traffic.fetched - before < 1000


def test_reduce_metrics_is_the_shared_one():
    assert reduce_metrics({"x/max": [1.0, 3.0], "y": [(2.0, 4)]}) == {"x/max": 3.0, "y": 0.5}


def test_a_trajectory_of_several_rows_is_one_answer_to_the_first_rows_prompt():
    """The second row goes on where the first one's context was rewritten; only its end says whether it was cut."""
    batch = make_batch()
    batch.non_tensor_batch |= {
        "trajectory": object_array(["a", "a"]),
        "finish_reason": object_array(["length", "stop"]),
        "num_turns": object_array([3, 3]),
    }
    metrics = compute_data_metrics(batch)
    expected = {
        "critic/score/mean": 1.5,
        "critic/rewards/min": 1.0,
        "critic/advantages/mean": 0.0,
        "prompt_length/mean": 1.0,
        "response_length/max": 4.0,
        "response_length/min": 4.0,
        "response_length/clip_ratio": 0.0,
        "num_turns/mean": 3.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
