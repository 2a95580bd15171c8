"""Group statistics by hand."""

import numpy as np
import pytest
import torch

from verl.algos.groups import Groups

MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0], [0, 1]])
VALUES = torch.tensor([1.0, 10.0, 3.0, 100.0, 30.0])
UIDS = ["a", "b", "a", "a", "b"]  # row 3 is filler


def test_statistics_by_hand():
    groups = Groups(UIDS, MASK)
    assert groups.size.tolist() == [2, 2, 2, 2, 2]
    assert groups.mean(VALUES).tolist() == [2, 20, 2, 2, 20]
    assert groups.centered(VALUES).tolist() == [-1, -10, 1, 0, 10]
    assert groups.std(VALUES).tolist() == pytest.approx([2**0.5, 200**0.5, 2**0.5, 2**0.5, 200**0.5])
    assert groups.max(VALUES).tolist() == [3, 30, 3, 3, 30]
    assert groups.max(VALUES, among=VALUES < 30).tolist() == [3, 10, 3, 3, 10]
    assert groups.max(VALUES, among=VALUES > 99).tolist() == [-np.inf] * 5


@pytest.mark.parametrize(
    "ids",
    [
        np.array(UIDS, dtype=object),
        np.array([7, 8, 7, 7, 8]),
        torch.tensor([7, 8, 7, 7, 8]),
        np.array([None, "b", None, None, "b"], dtype=object),
    ],
)
def test_ids_of_any_kind(ids):
    assert Groups(ids, MASK).mean(VALUES).tolist() == [2, 20, 2, 2, 20]


def test_an_empty_batch_has_no_groups():
    groups = Groups(np.array([], dtype=object), MASK[:0])
    assert groups.mean(VALUES[:0]).tolist() == []


def test_one_id_per_row_is_needed():
    with pytest.raises(ValueError, match=r"^index: .*\b5 rows.*\(2,\)"):
        Groups(["a", "b"], MASK)


def test_scores_and_spreading():
    rewards = torch.tensor([[0.5, 1.0], [2.0, 9.0], [0.0, 9.0], [9.0, 9.0], [9.0, 1.0]])
    groups = Groups(UIDS, MASK)
    assert groups.scores(rewards).tolist() == [1.5, 2.0, 0.0, 0.0, 1.0]
    assert groups.to_tokens(VALUES, like=rewards).tolist() == [[1, 1], [10, 0], [3, 0], [0, 0], [0, 30]]
