"""Cost of the controller: calls per second, bytes per second, scaling with batch and ranks, and chains by reference.

Each is compared with plain Ray actors (values through the driver) and with the physical limit (a memory copy of the
same bytes).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from _report import report

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.column_store import traffic

MB = 2**20


class Bench(Worker):
    """Methods that only move data."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, tp: int) -> None:
        self.register_mesh_place("rollout", self.rank // tp, collect=self.rank % tp == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def ping(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def receive(self, data: DataProto) -> int:
        return data.nbytes

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate(self, data: DataProto, prompt: int, response: int) -> DataProto:
        return rollout(len(data), prompt, response)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto) -> int:
        data.batch["response_mask"].sum()
        return data.nbytes


@ray.remote(num_cpus=0)
class PlainActor:
    """The same with plain Ray: values through the driver."""

    def nothing(self) -> None:
        pass

    def receive(self, data: dict[str, torch.Tensor]) -> int:
        return sum(value.nbytes for value in data.values())

    def generate(self, rows: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
        return dict(rollout(rows, prompt, response).batch.items())

    def update(self, data: dict[str, torch.Tensor]) -> int:
        data["response_mask"].sum()
        return self.receive(data)


def rollout(rows: int, prompt: int, response: int) -> DataProto:
    """A batch as generation returns it: lengths are lognormal, so about half of it is padding."""
    lengths = np.random.default_rng(0).lognormal(np.log(response / 3), 0.7, rows).clip(1, response).astype(int)
    mask = (torch.arange(response)[None] < torch.from_numpy(lengths)[:, None]).long()
    responses = torch.randint(1, 1000, (rows, response)) * mask
    prompts = torch.randint(1, 1000, (rows, prompt))
    attention = torch.cat([torch.ones_like(prompts), mask], dim=1)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": attention.cumsum(1) - 1,
            "response_mask": mask,
            "rollout_log_probs": -mask.float(),
        }
    )


def median_seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median wall time after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def start_group(ranks: int) -> tuple[RayResourcePool, RayWorkerGroup]:
    pool = RayResourcePool([ranks], use_gpu=False)
    return pool, RayWorkerGroup(pool, RayClassWithInitArgs(Bench))


def calls_per_second(group: RayWorkerGroup, plain: list[Any]) -> list[dict[str, Any]]:
    compute = median_seconds(group.nothing, 200)
    control = median_seconds(group.ping, 200)
    plain_ray = median_seconds(lambda: ray.get([actor.nothing.remote() for actor in plain]), 200)
    return [
        {"call on 2 ranks": lane, "ms": seconds * 1e3, "calls/s": 1 / seconds, "plain Ray ms": plain_ray * 1e3}
        for lane, seconds in (("compute lane", compute), ("control lane", control))
    ]


def growth_with_batch(group: RayWorkerGroup, plain: list[Any], largest_mb: int) -> list[dict[str, Any]]:
    rows = []
    for size in [1, 10, 100, largest_mb]:
        data = DataProto.from_dict({"x": torch.arange(size * MB // 8).view(-1, 128)})
        halves = [{"x": half.batch["x"]} for half in data.chunk(2)]
        busy = time.process_time()
        start = time.perf_counter()
        group.receive(data)
        share = (time.process_time() - busy) / (time.perf_counter() - start)
        verl_seconds = median_seconds(lambda data=data: group.receive(data), 3)
        plain_ray = median_seconds(
            lambda halves=halves: ray.get([a.receive.remote(half) for a, half in zip(plain, halves, strict=True)]), 3
        )
        copy = median_seconds(lambda data=data: data.batch["x"].clone(), 3)
        rows.append(
            {
                "batch MB": size,
                "ms": verl_seconds * 1e3,
                "GB/s": size / 1024 / verl_seconds,
                "plain Ray ms": plain_ray * 1e3,
                "copy ms": copy * 1e3,
                "× copy": verl_seconds / copy,
                "controller CPU share": share,
            }
        )
    return rows


def growth_with_ranks(largest: int) -> list[dict[str, Any]]:
    rows = []
    data = DataProto.from_dict({"x": torch.arange(16 * MB // 8).view(-1, 128)})
    for ranks in [1, 2, 4, 8]:
        if ranks > largest:
            break
        pool, group = start_group(ranks)
        empty, full = median_seconds(group.nothing, 50), median_seconds(lambda group=group: group.receive(data), 5)
        busy = time.process_time()
        for _ in range(50):
            group.nothing()
        own = (time.process_time() - busy) / 50
        rows.append(
            {
                "ranks": ranks,
                "empty call ms": empty * 1e3,
                "controller CPU ms per call": own * 1e3,
                "16 MB call ms": full * 1e3,
            }
        )
        group.shutdown()
        pool.release()
    return rows


def chains(group: RayWorkerGroup, plain: list[Any], rows: int, prompt: int, response: int) -> list[dict[str, Any]]:
    """generate on dp1×tp2 → balance → union(scores) → update on dp2."""
    group.setup(2)
    seeds = DataProto.from_dict({"seed": torch.arange(rows)})
    scores = DataProto.from_dict({"score": torch.rand(rows)})
    order = np.random.default_rng(1).permutation(rows)
    token_bytes = rollout(rows, prompt, response).nbytes

    def by_reference() -> None:
        batch = group.generate(seeds, prompt, response)
        batch.reorder(order)
        group.update(batch.union(scores))

    def through_the_controller() -> None:
        batch = group.generate(seeds, prompt, response).fetch()
        batch.reorder(order)
        group.update(batch.union(scores.select()))

    def plain_ray() -> None:
        batch = ray.get(plain[0].generate.remote(rows, prompt, response))
        index = torch.from_numpy(order)
        batch = {key: value[index] for key, value in batch.items()} | {"score": scores.batch["score"]}
        halves = [{key: value[half::2].contiguous() for key, value in batch.items()} for half in range(2)]
        ray.get([actor.update.remote(half) for actor, half in zip(plain, halves, strict=True)])

    table = []
    for name, work in [
        ("by reference", by_reference),
        ("fetched by the controller", through_the_controller),
        ("plain Ray, through the driver", plain_ray),
    ]:
        before = traffic.fetched + traffic.stored
        work()
        transferred = traffic.fetched + traffic.stored - before
        if name == "fetched by the controller":
            transferred += token_bytes  # sent to the workers again
        if name.startswith("plain Ray"):
            transferred = 2 * token_bytes
        table.append(
            {
                "generate → balance → union → update": name,
                "ms": median_seconds(work, 3) * 1e3,
                "MB through the controller": transferred / MB,
                "% of token bytes": 100 * transferred / token_bytes,
            }
        )
    creation = median_seconds(lambda: rollout(rows, prompt, response), 3)
    table.append({"generate → balance → union → update": "(creating the batch only)", "ms": creation * 1e3})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest-mb", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=6 * 1024 * MB)
    plain = [PlainActor.remote() for _ in range(2)]
    pool, group = start_group(2)
    report("Calls", calls_per_second(group, plain), args.json)
    report("Growth with the batch (2 ranks)", growth_with_batch(group, plain, args.largest_mb), args.json)
    chained = chains(group, plain, args.rows, args.prompt, args.response)
    report(f"Chained calls, {args.rows} rows of {args.prompt} + {args.response} tokens", chained, args.json)
    group.shutdown()
    pool.release()
    report("Growth with ranks", growth_with_ranks(args.ranks), args.json)
    ray.shutdown()


if __name__ == "__main__":
    main()
