"""Bundled columns: several columns in one stored object, read, taken, joined and pruned like columns of their own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.workers import WithRowSource, rollout_batch
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray.column_store import (
    BundledColumn,
    StoredRows,
    attach_bundle,
    bundle_rows,
    concat_columns,
    prune_parts,
    read_columns,
    take_rows,
)
from verl.utils.nested import deep_equal


def batch_of(seeds: list[int]) -> DataProto:
    batch = rollout_batch(seeds, 8, 16, 99)
    batch.batch["position_ids"] *= batch.batch["attention_mask"]  # positions of padding are not stored
    return batch


def stored_here(seeds: list[int]) -> StoredRows:
    return attach_bundle(*bundle_rows(batch_of(seeds)))


def assert_rows(values: dict, seeds: list[int]) -> None:
    """The columns have the tokens of these seeds; padding is as narrow as the rows allow."""
    expected = batch_of(seeds).batch
    assert set(values) == set(expected.keys())
    mask = expected["attention_mask"].bool()
    assert torch.equal(values["attention_mask"].sum(-1), mask.sum(-1))
    for name in ("input_ids", "position_ids"):
        assert torch.equal(values[name][values["attention_mask"].bool()], expected[name][mask]), name
    responses = expected["response_mask"].bool()
    for name in ("responses", "rollout_log_probs", "rollout_versions"):
        assert torch.equal(values[name][values["response_mask"].bool()], expected[name][responses]), name
    assert deep_equal(values["score"], expected["score"])


def test_all_tensor_columns_of_a_batch_are_one_object():
    stored, contents = bundle_rows(batch_of([1, 2, 3]))
    assert set(contents) == set(stored.columns) == set(batch_of([1]).batch.keys()), "object columns are not in it"
    completed = attach_bundle(stored, contents)
    parts = [part for column in completed.columns.values() for part in column.refs]
    assert all(isinstance(part, BundledColumn) and part.bundle is contents for part in parts)
    assert_rows(read_columns(completed.columns), [1, 2, 3])


@pytest.mark.parametrize("seed", range(10))
def test_taking_joining_and_pruning_keep_the_rows(seed):
    draw = random.Random(seed)
    parts = [[draw.randrange(100) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(1, 4))]
    columns = concat_columns([stored_here(part).columns for part in parts])
    seeds = [number for part in parts for number in part]
    assert_rows(read_columns(columns), seeds)
    index = np.array([draw.randrange(len(seeds)) for _ in range(draw.randint(1, 8))])
    taken = take_rows(columns, index)
    assert_rows(read_columns(taken), [seeds[row] for row in index])
    pruned = prune_parts(taken)
    assert_rows(read_columns(pruned), [seeds[row] for row in index])
    part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    used = len(set(part_of[index].tolist()))
    assert all(len({id(part.bundle) for part in column.refs}) == used for column in pruned.values())


def test_a_bundled_column_is_read_without_the_others():
    columns = stored_here([4, 5]).columns
    assert read_columns({"score": columns["score"]})["score"].tolist() == [4.0, 5.0]


@pytest.fixture
def handle():
    return LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(WithRowSource)).handle(0)


def test_a_path_calls_the_method_of_an_attribute(handle):
    assert handle.call("source.double", 21) == 42
    handle.notify("source.double", 1)
    with pytest.raises(AttributeError, match="nothing"):
        handle.call("source.nothing")
    with pytest.raises(LookupError, match="no rows here"):
        handle.call_rows("source.fail")


def test_rows_of_a_rank_in_this_process(handle):
    value, rows = handle.call_rows("source.rows", [7, 8])
    assert value == "2 rows"
    assert rows.rows == 2
    assert_rows(read_columns(rows.columns), [7, 8])
    assert handle.call_rows("source.rows", []) == ("0 rows", None)
