"""Worker groups on a GPU: placement, device, nccl beside gloo, batches from and to the device."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_a_rank_on_a_gpu_computes_there_and_its_results_come_back(ray_gpu):
    from tests.support.workers import DeviceWorker
    from verl.protocol import DataProto
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([1], use_gpu=True)
    data = DataProto.from_dict({"x": torch.arange(6).float()}, {"name": list("abcdef")})
    # Two groups share the device of one pool.
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(DeviceWorker)) as first,
        RayWorkerGroup(pool, RayClassWithInitArgs(DeviceWorker)) as second,
    ):
        assert first.setup() == second.setup() == ["cuda:0"]
        result = second.total(first.total(data))
        assert result.batch["x"].tolist() == [4 * i for i in range(6)]
        assert result.batch["total"].tolist() == [30.0] * 6
        assert result.non_tensor_batch["name"].tolist() == list("abcdef")
    pool.release()
