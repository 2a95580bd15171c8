"""RankHandle.call_rows on Ray: rows are one object of the caller, which outlives the process that computed them."""

from __future__ import annotations

import pickle

import pytest
import ray

from tests.support.workers import WithRowSource, rollout_batch
from verl.single_controller.base import WorkerDiedError
from verl.single_controller.ray import BatchRef, RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.column_store import StoredRows, concat_columns, read_columns, take_rows

MANY = list(range(2, 402))  # larger than what Ray returns inline


@pytest.fixture(scope="module")
def group(cpu_pool):
    """Shared: the last test kills a rank."""
    with RayWorkerGroup(cpu_pool, RayClassWithInitArgs(WithRowSource)) as started:
        yield started


def bundles(rows: StoredRows) -> set:
    return {part.bundle for column in rows.columns.values() for part in column.refs}


def scores(rows: StoredRows) -> list[float]:
    return read_columns({"score": rows.columns["score"]})["score"].tolist()


def test_bundled_columns_travel_to_other_ranks_by_reference(group):
    _, rows = group.handle(0).call_rows("source.rows", MANY)
    batch = BatchRef.from_stored(rows)
    received = group.look(batch.select(["score", "responses"])[:4])
    assert received.batch["score"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert received.batch["responses"].tolist() == batch[:4].batch["responses"].tolist()
    (bundle,) = bundles(rows)
    assert set(ray.get(bundle)) == set(rows.columns)


def test_rows_are_one_object_that_outlives_the_rank(group):
    handles = [group.handle(rank) for rank in range(2)]
    assert [handle.call("source.double", 4) for handle in handles] == [8, 8]
    value, large = handles[0].call_rows("source.rows", MANY)
    _, small = pickle.loads(pickle.dumps(handles[0])).call_rows("source.rows", [1])
    _, other = handles[1].call_rows("source.rows", [11, 12])
    assert value == "400 rows"
    assert handles[0].call_rows("source.rows", []) == ("0 rows", None)
    assert [len(bundles(rows)) for rows in (large, small, other)] == [1, 1, 1]
    with pytest.raises(LookupError, match="no rows here"):
        handles[0].call_rows("source.fail")

    with pytest.raises(WorkerDiedError, match="rank 0"):
        handles[0].call_rows("source.die")
    assert scores(large) == [float(seed) for seed in MANY]
    assert scores(small) == [1.0]

    columns = concat_columns([large.columns, small.columns, other.columns])
    taken = take_rows(columns, [401, 399, 400, 0])
    batch = BatchRef(taken, 4, {})
    assert batch.batch["score"].tolist() == [11.0, 401.0, 1.0, 2.0]
    seeds = [11, 401, 1, 2]
    expected = rollout_batch(seeds, 8, 16, 99).batch
    fetched = batch.fetch()
    own = fetched.batch["attention_mask"].bool()
    assert (fetched.batch["input_ids"][own] == expected["input_ids"][expected["attention_mask"].bool()]).all()
