"""Rows without their padding: every attended token in order, and for every response token the one before it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models.packing import right_padded_rows

ROWS = st.lists(st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 5)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(rows=ROWS, pad=st.integers(0, 3))
def test_front_rows_keep_every_attended_token_and_know_its_predecessor(rows, pad):
    # A prompt mask of any pattern (at least its first token on), then a response of some length.
    mask = torch.tensor([[True, *prompt, *(t < length for t in range(5))] for prompt, length in rows]).long()
    ids = torch.arange(100, 100 + mask.numel()).view_as(mask)
    front = right_padded_rows(ids, mask, response_length=5, pad_token_id=pad)
    for row in range(len(rows)):
        kept = ids[row][mask[row].bool()].tolist()
        assert front.input_ids[row].tolist() == kept + [pad] * (front.input_ids.shape[1] - len(kept))
        assert front.attention_mask[row].sum() == len(kept)
    assert front.input_ids.shape[1] == int(mask.sum(1).max())
    places = list(zip(front.rows.tolist(), front.columns.tolist(), strict=True))
    assert places == [(row, t) for row, (_, length) in enumerate(rows) for t in range(length)]
    for (row, column), before, label in zip(places, front.before, front.labels, strict=True):
        assert label == ids[row, 5 + column]
        assert front.input_ids.flatten()[before + 1] == label
        assert before // front.input_ids.shape[1] == row


def test_a_response_without_a_prompt_is_refused():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match=r"^attention_mask: row 1\b"):
        right_padded_rows(torch.ones_like(mask), mask, response_length=1)


def test_rows_of_padding_only_are_kept_as_rows():
    mask = torch.zeros((2, 6), dtype=torch.long)
    front = right_padded_rows(torch.full((2, 6), 9), mask, response_length=3, pad_token_id=4)
    assert front.input_ids.tolist() == [[4], [4]]
    assert front.rows.numel() == 0
