"""Answers scored while others are still generated: the same scores on the same rows, errors included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.workers.reward_manager import NaiveRewardManager
from verl.workers.reward_manager.naive import RewardError

TEXTS = ["#### 72", "it is #### 73", "#### 72", "die", "#### 7"]


def scoring():
    """A function that travels alone, without this module and what it imports."""

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "die":
            raise RuntimeError("no")
        right = float(solution_str.endswith(ground_truth))
        return {"score": right, "index": extra_info["index"], "text": solution_str}

    return compute_score


def numbered(data):
    """As the trainer sends it: every row knows its place in the request."""
    data.non_tensor_batch["row"] = np.array(range(len(data)), dtype=object)
    return data


def finished(data, rows):
    lengths = data.batch["attention_mask"][:, 3:].sum(1).tolist()
    return [(row, data.batch["responses"][row, : lengths[row]].numpy().astype(np.int32)) for row in rows]


@pytest.mark.parametrize("name", ["naive", "dapo"])
def test_scores_ahead_are_those_of_the_whole_batch(manager, batch, name):
    data = numbered(batch(TEXTS))
    scorer = manager(name, scoring(), num_processes=1)
    plain = scorer(data, return_dict=True)
    for early in ([], [1], [3, 0], [4, 2, 3, 0, 1]):
        ahead = scorer.score_ahead(data.non_tensor_batch)
        ahead.add(finished(data, early))
        assert ahead.submitted == len(early)
        found = scorer(data, return_dict=True)
        assert torch.equal(found["reward_tensor"], plain["reward_tensor"])
        assert found["reward_extra_info"] == plain["reward_extra_info"]


def test_a_score_belongs_to_a_row_and_not_to_what_it_says(manager, batch):
    """Equal answers under equal names, rows that change places, an answer that came out otherwise: each its own."""
    same = {"uid": ["a", "a", "a"]}
    truths = [{"style": "rule", "ground_truth": truth} for truth in ("72", "72", "7")]
    data = numbered(batch(["#### 72", "#### 7", "#### 72"], reward_model=truths, **same))
    scorer = manager("naive", scoring(), num_processes=1)
    ahead = scorer.score_ahead(data.non_tensor_batch)
    other = batch(["#### 1", "#### 72", "#### 3"])
    ahead.add(finished(data, [0, 2]) + finished(other, [1]))
    turned = data.select_idxs([2, 0, 1])
    result = scorer(turned, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [0.0, 1.0, 0.0]
    assert result["reward_extra_info"]["index"] == [2, 0, 1]
    assert result["reward_extra_info"]["text"] == ["#### 72", "#### 72", "#### 7"]


def test_a_failure_ahead_stops_the_call_and_not_the_generation(manager, batch):
    data = numbered(batch(TEXTS))
    scorer = manager("naive", scoring(), num_processes=1, on_error="fail")
    scorer.score_ahead(data.non_tensor_batch).add(finished(data, [3]))
    with pytest.raises(RewardError, match=r"1 of 5 samples.*row 3"):
        scorer(data)


def test_what_is_scored_ahead_is_not_scored_again(manager, batch, tmp_path):
    def count(solution_str, ground_truth):
        with open(tmp_path / "calls", "a") as file:
            file.write(solution_str + "\n")
        return 1.0

    data = numbered(batch(["one", "two", "three"]))
    scorer = manager("naive", count, num_processes=1)
    scorer.score_ahead(data.non_tensor_batch).add(finished(data, [2, 0]))
    scorer(data)
    assert sorted((tmp_path / "calls").read_text().split()) == ["one", "three", "two"]


def test_managers_that_score_in_their_own_way_are_left_alone(manager, batch):
    class Whole(NaiveRewardManager):
        def score(self, samples):
            return super().score(samples)

    columns = batch(TEXTS).non_tensor_batch
    plain = manager("naive", scoring(), num_processes=1)
    assert plain.score_ahead(columns) is not None
    nameless = {name: column for name, column in columns.items() if name != "data_source"}
    assert plain.score_ahead(nameless) is not None, "only our reward functions are chosen by the data source"
    assert manager("naive", None, num_processes=1).score_ahead(nameless) is None
    assert (
        manager("batch", lambda solution_strs, ground_truths: [0.0] * len(solution_strs)).score_ahead(columns) is None
    )
    assert manager("naive", scoring(), num_processes=0).score_ahead(columns) is None, "the caller's thread is busy"
    assert Whole(plain.tokenizer, 0, scoring(), num_processes=1).score_ahead(columns) is None
