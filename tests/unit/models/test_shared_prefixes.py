"""Prefix trees against definitions: every distinct prefix is one computed token, in every row's path."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models.packing import packed_rows
from verl.models.shared_prefixes import PrefixTree, TreePacking, prefix_order, share_prefixes, token_bytes

# Few different ids and lengths: nested prefixes, identical rows and rows that begin other rows are frequent.
ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=9)


def tree_of(rows):
    tokens = [token_bytes(np.array(row)).tobytes() for row in rows]
    order, shared = prefix_order(tokens, 4)
    return order, PrefixTree(np.array([len(rows[row]) for row in order]), shared)


def prefixes(rows):
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


def test_a_nested_tree_by_hand():
    rows = [[1, 2, 3, 4], [1, 2, 5], [9, 9], [1, 2, 3, 4], [1, 2, 3, 7, 8], [1]]
    order, tree = tree_of(rows)
    assert order.tolist() == [5, 0, 3, 4, 1, 2]
    assert tree.shared.tolist() == [0, 1, 4, 3, 2, 0]
    assert [path.tolist() for path in tree.paths] == [
        [0],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 4, 5],
        [0, 1, 6],
        [7, 8],
    ]


def test_ids_above_one_byte_and_experts_distinguish_tokens():
    ids = np.array([[1, 256], [1, 65536], [1, 256]])
    order, shared = prefix_order([token_bytes(row).tobytes() for row in ids], 4)
    assert (order.tolist(), shared.tolist()) == ([0, 2, 1], [0, 2, 1])
    experts = np.array([[[3], [4]], [[3], [4]], [[3], [5]]], dtype=np.int16)
    rows = [token_bytes(*row) for row in zip(ids, experts, strict=True)]
    order, shared = prefix_order([row.tobytes() for row in rows], rows[0].shape[1])
    assert (order.tolist(), shared.tolist()) == ([0, 2, 1], [0, 1, 1])


@settings(max_examples=200)
@given(rows=ROWS)
def test_computed_tokens_are_the_distinct_prefixes(rows):
    order, tree = tree_of(rows)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert tree.total == len(prefixes(rows))
    of_token = {}
    for row, path in zip(order, tree.paths, strict=True):
        for position, token in enumerate(path.tolist()):
            prefix = tuple(rows[row][: position + 1])
            assert of_token.setdefault(token, prefix) == prefix
    assert len(of_token) == tree.total


@settings(max_examples=100)
@given(rows=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(0, 4)), min_size=1))
def test_shared_rows_have_the_tokens_positions_and_predecessors_of_the_plain_rows(rows):
    ids = torch.zeros(len(rows), 8, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(rows):
        ids[row, 4 - len(prompt) : 4] = torch.tensor(prompt)
        ids[row, 4:] = torch.tensor([5, 6, 5, 6])
        mask[row, 4 - len(prompt) : 4 + length] = 1
    plain = packed_rows(ids, mask, response_length=4)
    shared = share_prefixes(plain)
    if shared is plain:
        return
    assert isinstance(shared.packing, TreePacking)
    assert shared.packing.total == shared.input_ids.shape[1] == shared.position_ids.shape[1]
    index = torch.from_numpy(shared.packing.token_index)
    assert torch.equal(shared.input_ids[0, index], plain.input_ids[0])
    assert torch.equal(shared.position_ids[0, index], plain.position_ids[0])
    assert torch.equal(shared.before, index[plain.before])
    assert torch.equal(shared.last, index[plain.last])
    for name in ("rows", "columns", "labels"):
        assert torch.equal(getattr(shared, name), getattr(plain, name))


def test_rows_without_a_common_token_are_returned_unchanged():
    plain = packed_rows(torch.tensor([[1, 2], [2, 1], [3, 1]]), torch.ones(3, 2, dtype=torch.long))
    assert share_prefixes(plain) is plain
