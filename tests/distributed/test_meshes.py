"""Dispatch over named meshes: data over dp, the same shard to a tp group, results from one rank of each."""

from __future__ import annotations

import pytest
import torch

from tests.support.workers import MeshWorker
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, WorkerCallError
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


@pytest.mark.slow
def test_dp2_tp2_over_a_real_device_mesh(ray_cluster):
    pool = RayResourcePool([4], use_gpu=False)
    with RayWorkerGroup(pool, RayClassWithInitArgs(MeshWorker, 2, 2)) as group:
        group.setup()
        result = group.mark(batch(6))
        assert result.batch["x"].tolist() == list(range(6))
        assert result.batch["rank"].tolist() == [0, 0, 0, 2, 2, 2], "one rank of each tp pair answers"
        assert group.last_seen() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]], "a tp pair sees the same shard"
        uneven = group.mark(batch(5))
        assert uneven.batch["x"].tolist() == list(range(5))
        assert group.last_seen()[3] == [3, 4, 0], "filled with the first row"
    pool.release()


def test_dp1_tp2_and_an_unknown_mesh(ray_roles):
    group = ray_roles["MeshWorker"]
    group.setup(real_mesh=False)
    assert group.mark(batch(3)).batch["rank"].tolist() == [0, 0, 0]
    assert group.last_seen() == [[0, 1, 2]] * 2
    with pytest.raises(WorkerCallError, match=r"'nowhere' .*\['actor'\].*register_mesh"):
        group.lost(batch(3))


def test_a_mesh_in_which_nobody_answers_for_a_shard_is_refused():
    group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(MeshWorker, 1, 1))
    group.execute_all_sync("register_mesh_place", "actor", 0, False)
    with pytest.raises(ValueError, match=r"mesh 'actor': .*dp_rank.*\[\(0, False\)\]"):
        group.mark(batch(2))


def test_the_local_group_dispatches_over_meshes_too():
    group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(MeshWorker, 1, 1))
    group.setup(real_mesh=False)
    assert group.mark(batch(3)).batch["rank"].tolist() == [0, 0, 0]
