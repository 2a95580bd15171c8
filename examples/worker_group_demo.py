"""A worker group on one page: two Ray workers square and sum a batch, then one is killed and the controller raises.

python examples/worker_group_demo.py
"""

from __future__ import annotations

import os
import signal
import time

import ray
import torch
import torch.distributed as dist

from verl import DataProto
from verl.single_controller.base import Worker, WorkerDiedError
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class Squarer(Worker):
    """One rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self) -> int:
        self.init_process_group()
        return os.getpid()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def square(self, data: DataProto) -> DataProto:
        data.batch["y"] = data.batch["x"] ** 2
        total = data.batch["y"].sum()
        dist.all_reduce(total)
        data.batch["total"] = total.expand(len(data)).clone()
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main() -> None:
    ray.init(include_dashboard=False, log_to_driver=False)
    with RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Squarer)) as group:
        pids = group.setup()
        print(f"two ranks, processes {pids}")
        batch = DataProto.from_dict({"x": torch.arange(1, 7)}, {"name": list("abcdef")})
        result = group.square(batch)
        print(f"split over the ranks, computed, concatenated: y = {result.batch['y'].tolist()}")
        total = int(result.batch["total"][0])
        print(f"summed over both ranks with gloo: total = {total} (expected {sum(i * i for i in range(1, 7))})")
        if total != 91:
            raise SystemExit("the sum over the ranks is wrong")

        future = group.sleep(60)
        time.sleep(0.5)
        start = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        try:
            future.get()
        except WorkerDiedError as error:
            print(f"rank 1 was killed during a call; after {time.monotonic() - start:.1f} s the controller raised:")
            print("  " + str(error).splitlines()[0])
    ray.shutdown()


if __name__ == "__main__":
    main()
