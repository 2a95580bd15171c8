"""What a method makes of filler rows is dropped, also where it gives several rows for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto, object_array
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import BatchShard, Dispatch, register
from verl.single_controller.base.worker import RankHost, RankInfo
from verl.single_controller.base.worker_group import Failure
from verl.single_controller.ray import RayClassWithInitArgs


class Agent(Worker):
    """Answers row number i in i + 1 rows."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def act(self, data: DataProto, named: bool) -> DataProto:
        numbers = data.batch["number"].tolist()
        rows = [number for number in numbers for _ in range(number + 1)]
        names = {"trajectory": object_array([f"t/{number}" for number in rows])} if named else {}
        return DataProto.from_dict({"number": torch.tensor(rows)}, names)


@pytest.mark.parametrize(("fillers", "left"), [(0, [1, 1, 0, 2, 2, 2]), (1, [1, 1, 0]), (3, [])])
def test_the_rows_of_fillers_are_dropped_whatever_their_number(fillers, left):
    host = RankHost()
    assert host.construct(RankInfo(0, 1, 0, 1, "127.0.0.1", 0, "cpu"), RayClassWithInitArgs(Agent)) is None
    (role,) = host.describe()[1]
    data = DataProto.from_dict({"number": torch.from_numpy(np.array([1, 0, 2]))})
    result = host.call(role, "act", [BatchShard(data, fillers), True], {}, "compute")
    assert result.batch["number"].tolist() == left
    if fillers:
        unnamed = host.call(role, "act", [BatchShard(data[:2], fillers % 2), False], {}, "compute")
        assert isinstance(unnamed, Failure), "3 rows for 2, and nothing says whose they are"
