"""Right answers are counted per data source, and only where a score says right or wrong."""

from __future__ import annotations

import logging

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.scoring import correct_responses, log_step_accuracy
from verl.trainer.ppo.validator import sample_metrics, with_unfinished


def scored(**columns: list) -> DataProto:
    scores = torch.zeros(4, 3)
    scores[:, 2] = torch.tensor([1.0, 0.0, 0.7, 1.0])
    objects = {"data_source": ["math", "math", "chat", "chat"]} | columns
    tensors = {"answer_scores": scores.sum(-1), "response_mask": torch.ones(4, 3, dtype=torch.int64)}
    return DataProto.from_dict(tensors, {name: object_array(values) for name, values in objects.items()})


def test_a_training_batch_is_said_line_by_line(caplog):
    caplog.set_level(logging.INFO, logger="verl")
    log_step_accuracy(scored(), {}, "data_source", scores_are_continuous=False, step=3)
    assert caplog.messages == [
        "step 3: math Correct: 1/2, Accuracy: 0.50",
        "step 3: chat Correct: 1/2, Accuracy: 0.50",
    ]


def test_what_the_reward_calls_acc_wins_over_the_score_and_a_column_of_the_data_does_not(caplog):
    caplog.set_level(logging.INFO, logger="verl")
    batch = scored(acc=[1.0, 1.0, np.float64(1.0), False])
    log_step_accuracy(batch, {"acc": None}, "data_source", scores_are_continuous=True, step=1)
    assert caplog.messages == [
        "step 1: math Correct: 2/2, Accuracy: 1.00",
        "step 1: chat Correct: 1/2, Accuracy: 0.50",
    ]
    caplog.clear()
    log_step_accuracy(batch, {}, "data_source", scores_are_continuous=False, step=1)
    assert "math Correct: 1/2" in caplog.text


def test_a_reward_model_gives_degrees_and_nothing_is_said(caplog):
    caplog.set_level(logging.INFO, logger="verl")
    log_step_accuracy(scored(), {}, "data_source", scores_are_continuous=True, step=1)
    assert caplog.messages == []
    assert correct_responses(["a", "b"], [3.0, 0.0], [None, True], scores_are_continuous=True) == {"b": [True]}


def test_an_answer_that_could_not_be_scored_counts_only_where_it_is_not_masked(caplog):
    caplog.set_level(logging.INFO, logger="verl")
    batch = scored(scoring_failed=[0.0, 1.0, 0.0, 1.0])
    log_step_accuracy(batch, {}, "data_source", scores_are_continuous=False, step=1)
    assert "math Correct: 1/2" in caplog.text
    caplog.clear()
    batch.batch["response_mask"][[1, 3]] = 0
    log_step_accuracy(batch, {}, "data_source", scores_are_continuous=False, step=1)
    assert caplog.messages == ["step 1: math Correct: 1/1, Accuracy: 1.00", "step 1: chat Correct: 0/1, Accuracy: 0.00"]


def test_a_trajectory_of_several_rows_is_right_or_wrong_once(caplog):
    """Its last row has the score: four rows, three answers."""
    caplog.set_level(logging.INFO, logger="verl")
    batch = scored(trajectory=["a", "b", "b", "c"], data_source=["math", "math", "math", "chat"])
    batch.batch["answer_scores"][2] = 0.0
    log_step_accuracy(batch, {}, "data_source", scores_are_continuous=False, step=1)
    assert caplog.messages == ["step 1: math Correct: 1/2, Accuracy: 0.50", "step 1: chat Correct: 1/1, Accuracy: 1.00"]


def test_an_agent_that_failed_is_wrong_also_beside_answers_that_could_not_be_scored(caplog):
    caplog.set_level(logging.INFO, logger="verl")
    status = [{"status": "finished"}, {"status": "failed"}, {"status": "finished"}, {"status": "aborted"}]
    batch = scored(agent_metrics=status, scoring_failed=[1.0, 0.0, 0.0, 0.0])
    batch.batch["response_mask"][[0, 1, 3]] = 0
    log_step_accuracy(batch, {}, "data_source", scores_are_continuous=False, step=1)
    assert caplog.messages == ["step 1: math Correct: 0/1, Accuracy: 0.00", "step 1: chat Correct: 0/2, Accuracy: 0.00"]


def test_where_nothing_is_right_or_wrong_a_failed_agent_is_not_either():
    sources, unfinished = ["a", "a", "b", "b"], [False, True, False, True]
    assert correct_responses(
        sources, [3.0, 0.0, 2.0, 0.0], [None, None, True, None], scores_are_continuous=True, unfinished=unfinished
    ) == {"b": [True, False]}


def test_an_unfinished_agent_is_wrong_in_validation_whatever_its_reward_function_returned():
    samples = {"uid": ["a", "b", "c"], "data_source": ["math"] * 3, "reward": [1.0] * 3, "acc": [1.0, 1.0, None]}
    samples |= with_unfinished(samples, [False, True, True], scores_are_continuous=False)
    assert samples["acc"] == [1.0, 0.0, 0.0]
    metrics = sample_metrics(samples, scores_are_continuous=False)
    assert metrics["val-core/math/acc/mean@1"] == metrics["val/math/accuracy"] == 1 / 3
