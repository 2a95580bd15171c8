"""Lengths of rows in the column store: read from masks, and where the tokens of a column are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.ray import column_store
from verl.single_controller.ray.column_store import Lengths, RowMap, lengths_of, read_columns, store_rows, store_with
from verl.types.schema import PROMPT, RESPONSE, ROW, SEQUENCE

LENGTHS = Lengths(np.array([1, 3, 0]), np.array([2, 0, 1]))
# Prompts padded to 4, responses to 3.
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0]])


def equal(one: Lengths, other: Lengths) -> bool:
    return one.prompt.tolist() == other.prompt.tolist() and one.response.tolist() == other.response.tolist()


def test_lengths_and_widths_are_those_of_the_mask():
    lengths, widths = lengths_of({"attention_mask": MASK, "responses": torch.zeros(3, 3)})
    assert equal(lengths, LENGTHS)
    assert widths == (4, 3), "with padding"
    assert lengths.widths == (3, 2), "without"
    without_responses, widths = lengths_of({"attention_mask": MASK[:, :4]})
    assert without_responses.prompt.tolist() == [1, 3, 0]
    assert without_responses.response.tolist() == [0, 0, 0]
    assert widths == (4, 0)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"attention_mask": torch.zeros(0, 7)},
        {"attention_mask": torch.ones(3)},
        {"attention_mask": torch.ones(3, 2), "responses": torch.zeros(3, 3)},  # narrower than the responses
        {"attention_mask": MASK.flip(1), "responses": torch.zeros(3, 3)},  # right-padded prompts
        {"attention_mask": torch.tensor([[1, 0, 1]]), "responses": torch.zeros(1, 2)},  # left-padded responses
        {"attention_mask": torch.tensor([[1, 0, 1]]), "responses": torch.zeros(1, 0)},  # a hole
    ],
)
def test_without_a_mask_of_padded_rows_lengths_are_unknown(tensors):
    assert lengths_of(tensors) is None


@pytest.mark.parametrize(
    ("axis", "starts", "ends"),
    [(PROMPT, [3, 1, 4], [4, 4, 4]), (RESPONSE, [0, 0, 0], [2, 0, 1]), (SEQUENCE, [3, 1, 4], [6, 4, 5])],
)
def test_windows_are_the_real_tokens_of_a_column(axis, starts, ends):
    assert [window.tolist() for window in LENGTHS.windows(axis, prompt_width=4)] == [starts, ends]


def test_lengths_are_taken_and_concatenated_with_their_rows():
    assert equal(LENGTHS[np.array([2, 0])], Lengths(np.array([0, 1]), np.array([1, 2])))
    assert equal(Lengths.concat([LENGTHS[:1], LENGTHS[1:]]), LENGTHS)
    assert Lengths(np.array([], int), np.array([], int)).widths == (0, 0)
    known, unknown = (RowMap((3,), np.arange(3), lengths) for lengths in (LENGTHS, None))
    assert RowMap.concat([known, unknown]).lengths is None
    joined = RowMap.concat([known, known]).take(np.array([5, 0]))
    assert equal(joined.lengths, Lengths(np.array([0, 1]), np.array([1, 2])))


def stored(tensors: dict[str, torch.Tensor], known: Lengths | None = None) -> tuple[Any, list[Any]]:
    """A batch stored in this process, and the contents of its columns."""
    contents: list[Any] = []

    def put(content: Any) -> column_store.BundledColumn:
        contents.append(content)
        return column_store.BundledColumn({"content": content}, "content")

    with store_with(put):
        return store_rows(DataProto.from_dict(tensors), known), contents


@pytest.mark.parametrize("known", [LENGTHS, LENGTHS[:2], None])
def test_results_without_a_mask_are_stored_by_the_lengths_of_their_rows(known):
    values = torch.tensor([[1.5, 2.5], [0, 0], [3.5, 0]])
    rows, (content,) = stored({"values": values}, known)
    column = rows.columns["values"]
    if known is LENGTHS:
        assert (column.type.axis, content[0].tolist(), content[1].tolist()) == (RESPONSE, [1.5, 2.5, 3.5], [0, 2, 2, 3])
    else:  # of other rows, or unknown
        assert column.type.axis == ROW
        assert column.rows.lengths is None
    assert torch.equal(read_columns(rows.columns)["values"], values)


def test_only_the_tokens_are_stored_and_reading_pads_to_the_longest_row():
    tensors = {"attention_mask": MASK, "responses": torch.arange(9).view(3, 3) * MASK[:, 4:]}
    rows, contents = stored(tensors)
    sizes = dict(zip(rows.columns, (len(content[0]) for content in contents), strict=True))
    assert sizes == {"attention_mask": 7, "responses": 3}
    columns = column_store.take_rows(rows.columns, np.array([2, 0]))
    values = read_columns(columns)
    assert values["attention_mask"].tolist() == [[0, 1, 0], [1, 1, 1]]
    assert values["responses"].tolist() == [[6, 0], [0, 1]]
