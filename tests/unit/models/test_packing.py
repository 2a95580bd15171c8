"""Packed rows: every attended token once and in order, and for every response token the one before it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models.packing import Packing, packed_rows

ROWS = st.lists(st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 5)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(rows=ROWS)
def test_packed_rows_are_the_attended_tokens_of_all_rows_and_know_their_predecessors(rows):
    # A prompt mask of any pattern (at least its first token on), then a response of some length.
    mask = torch.tensor([[True, *prompt, *(t < length for t in range(5))] for prompt, length in rows])
    ids = torch.arange(100, 100 + mask.numel()).view_as(mask)
    packed = packed_rows(ids, mask.long(), response_length=5).to(torch.device("cpu"))
    kept = [ids[row][mask[row]].tolist() for row in range(len(rows))]
    tokens = packed.input_ids[0]
    assert tokens.tolist() == [token for row in kept for token in row]
    assert packed.position_ids[0].tolist() == [place for row in kept for place in range(len(row))]
    assert packed.packing.lengths == tuple(map(len, kept))
    assert packed.packing.max_length == max(map(len, kept))
    assert packed.packing.cu_seqlens.tolist() == [sum(map(len, kept[:row])) for row in range(len(rows) + 1)]
    assert packed.packing.cu_seqlens.dtype == torch.int32
    assert tokens[packed.last].tolist() == [row[-1] for row in kept]
    places = list(zip(packed.rows.tolist(), packed.columns.tolist(), strict=True))
    assert places == [(row, t) for row, (_, length) in enumerate(rows) for t in range(length)]
    assert packed.labels.tolist() == [int(ids[row, 5 + column]) for row, column in places]
    assert torch.equal(tokens[packed.before + 1], packed.labels)
    assert (packed.position_ids[0, packed.before + 1] > 0).all(), "the token before it is of the same row"


def test_a_row_of_padding_only_is_one_padding_token():
    mask = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    ids = torch.full((3, 4), 9)
    packed = packed_rows(ids, mask, response_length=2, pad_token_id=4)
    assert packed.input_ids.tolist() == [[4, 9, 9, 4]]
    assert packed.packing.lengths == (1, 2, 1)
    assert packed.last.tolist() == [0, 2, 3]
    assert packed.rows.tolist() == [1]
    assert (ids == 9).all(), "the batch is not written to"


def test_a_response_without_a_prompt_is_refused():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match=r"^attention_mask: row 1\b"):
        packed_rows(torch.ones_like(mask), mask, response_length=1)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12))
def test_groups_hold_every_token_once_and_little_padding(lengths):
    packing = Packing.from_lengths(lengths)
    groups, home = packing.groups
    sequence_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    every = torch.arange(packing.total)
    places = torch.cat([every if group.tokens is None else group.tokens for group in groups])
    home = every if home is None else home
    assert torch.equal(places[home], every)
    assert len(set(home.tolist())) == packing.total
    at = 0
    for group in groups:
        size = packing.total if group.tokens is None else len(group.tokens)
        of = sequence_of[places[at : at + size]].view(-1, group.width)
        assert (of == of[:, :1]).all(), "a row of the rectangle is one sequence"
        shortest = min(lengths[i] for i in of[:, 0].tolist())
        assert group.width - shortest <= max(group.width // 4, 32)
        at += size
    assert len(groups) <= len(set(lengths))
