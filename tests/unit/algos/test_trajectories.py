"""Trajectories of several rows: joining and splitting by hand, and aggregation that does not see where rows end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos import agg_loss, get_policy_loss_fn, global_share, rows_of_trajectories
from verl.algos.groups import Trajectories
from verl.algos.masked_ops import LOSS_AGG_MODES, count_sequences

# "a" has two rows, "b" one, "c" two, the last of them masked throughout; an observation inside a row stays.
IDS = np.array(["a", "a", "b", "c", "c"], dtype=object)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]])
VALUES = torch.tensor([[1, 2, 9], [3, 9, 9], [4, 5, 6], [7, 9, 9], [9, 9, 9]])


def test_rows_are_joined_up_to_their_last_model_token_and_split_again():
    whole = Trajectories(IDS, MASK)
    assert len(whole) == 3
    assert whole.join(VALUES).tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert whole.mask.tolist() == [[1, 1, 1], [1, 0, 1], [1, 0, 0]]
    assert whole.split(whole.join(VALUES)).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 0, 0], [0, 0, 0]]
    assert whole.tokens().tolist() == [3, 3, 2, 1, 1]
    assert (whole.first_rows.tolist(), whole.last_rows.tolist()) == ([0, 2, 3], [1, 2, 3]), (
        "where the last model token is"
    )
    assert whole.at_last_row(torch.arange(5)).tolist() == [1, 2, 3]
    assert Trajectories(IDS, torch.zeros_like(MASK)).last_rows.tolist() == [1, 2, 4], "no model token at all"
    assert whole.to_rows(torch.tensor([5, 6, 7])).tolist() == [5, 5, 6, 7, 7]


def test_rows_need_not_stand_together_and_names_need_not_be_sorted():
    order = torch.tensor([2, 3, 0, 4, 1])
    whole = Trajectories(IDS[order.numpy()], MASK[order])
    assert whole.join(VALUES[order]).tolist() == [[4, 5, 6], [7, 0, 0], [1, 2, 3]]
    assert whole.split(whole.join(VALUES[order])).tolist() == [[4, 5, 6], [7, 0, 0], [1, 2, 0], [0, 0, 0], [3, 0, 0]]


@pytest.mark.parametrize("ids", [None, ["b", "a", "e", "d", "c"]])
def test_where_each_has_one_row_nothing_is_copied(ids):
    whole = Trajectories(ids, MASK)
    assert whole.join(VALUES) is VALUES
    assert whole.split(VALUES) is VALUES
    assert whole.mask is MASK
    assert whole.tokens().tolist() == [2, 1, 2, 1, 0]


def test_one_id_per_row():
    with pytest.raises(ValueError, match=r"^trajectory: 2\b.*\b5\b"):
        Trajectories(["a", "b"], MASK)


def cut(whole: torch.Tensor, at: list[list[int]], width: int) -> torch.Tensor:
    """Rows [rows, width] of the trajectories [trajectories, length], each cut at its own places."""
    rows = []
    for values, places in zip(whole, at, strict=True):
        for start, end in zip([0, *places], [*places, len(values)], strict=True):
            rows.append(torch.nn.functional.pad(values[start:end], (0, width - (end - start))))
    return torch.stack(rows)


def cuts(seed: int, trajectories: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(length - 1, rng.integers(0, 3), replace=False) + 1) for _ in range(trajectories)]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_cutting_trajectories_into_rows_changes_no_aggregated_loss(mode, seed):
    """Also over parts of the batch with global counts, whichever rows each part has."""
    rng = torch.Generator().manual_seed(seed)
    losses = torch.randn(6, 8, generator=rng, dtype=torch.float64)
    mask = (torch.rand(6, 8, generator=rng) < 0.6).long()
    at = cuts(seed, 6, 8)
    ids = [str(i) for i, places in enumerate(at) for _ in range(len(places) + 1)]
    row_losses, row_mask = cut(losses, at, 8), cut(mask, at, 8)
    tokens = Trajectories(ids, row_mask).tokens()
    counts = (float(mask.sum()), float(mask.any(-1).sum()))
    assert float(count_sequences(row_mask, tokens)) == pytest.approx(counts[1])
    expected = agg_loss(losses, mask, mode, loss_scale_factor=5)
    with rows_of_trajectories(tokens):
        torch.testing.assert_close(agg_loss(row_losses, row_mask, mode, loss_scale_factor=5), expected)
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.randperm(len(ids), generator=rng).chunk(3):
        with rows_of_trajectories(tokens[rows]):
            part = agg_loss(row_losses[rows], row_mask[rows], mode, loss_scale_factor=5)
            total += part * global_share(row_mask[rows], mode, *counts)
    torch.testing.assert_close(total, expected)


def test_a_policy_loss_need_not_know_of_trajectories():
    """One of two rows and two of one: per trajectory -(A1 + A2 + A3) / 3 and -A4; vanilla at a ratio of 1 is -A."""
    advantages, mask = torch.tensor([[1.0, 2.0], [6.0, 0.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0], [1, 0]])
    loss_fn = get_policy_loss_fn("vanilla")
    log_prob = torch.zeros(3, 2)
    with rows_of_trajectories(Trajectories(["a", "a", "b"], mask).tokens()):
        loss, _ = loss_fn(log_prob, log_prob, advantages, mask, "seq-mean-token-mean")
    assert loss.item() == pytest.approx(-(3.0 + 5.0) / 2)
    assert loss_fn(log_prob, log_prob, advantages, mask, "seq-mean-token-mean")[0].item() == pytest.approx(-12.5 / 3)


def test_a_loss_that_aggregates_some_rows_only_is_told():
    with (
        rows_of_trajectories(torch.tensor([3, 3, 1])),
        pytest.raises(ValueError, match="agg_loss: "),
    ):
        agg_loss(torch.ones(2, 2), torch.ones(2, 2), "seq-mean-token-mean")
