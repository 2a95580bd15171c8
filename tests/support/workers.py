"""Worker classes for the tests of worker groups, started in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.progress import expect, tick


class Counter(Worker):
    """Methods for every dispatch mode, blocking and non-blocking, on the compute and control lanes."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.log: list[int] = []
        self._waiting, self._released = threading.Event(), threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int, twice: bool = False) -> int:
        self.start += amount * (2 if twice else 1)
        return self.start

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value: object) -> object:
        return value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_zero(self, value: object) -> tuple[int, object]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def zero_by_execute(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def square(self, data: DataProto, power: int = 2) -> DataProto:
        data.batch["x"].pow_(power)  # in place: a worker may write to the batch that it received
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def square_later(self, data: DataProto) -> DataProto:
        return self.square(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def square_gated(self, data: DataProto) -> DataProto:
        """Process the rows one by one, as `allow_rows` permits."""
        self.gate = threading.Semaphore(0)
        expect(len(data))
        for _ in range(len(data)):
            self.gate.acquire(timeout=30)
            tick()
        return self.square(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def allow_rows(self, rows: int) -> None:
        self.gate.release(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def repeat_rows(self, data: DataProto) -> DataProto:
        return data.repeat(3, interleave=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def masked_tokens(self, data: DataProto) -> float:
        return float(data.batch["response_mask"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def with_metrics(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(data), "ranks": [self.rank]}, "same": 1})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def append(self, i: int) -> None:
        time.sleep(0.0005 * (i % 3))
        self.log.append(i)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_log(self) -> list[int]:
        return self.log

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, only_rank: int | None = None) -> None:
        if only_rank is None or only_rank == self.rank:
            raise KeyError(f"no such key on rank {self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def long_compute(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check_cancelled()
            time.sleep(0.01)
        return "finished"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def ping(self) -> int:
        return threading.get_ident()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def wait_for_release(self) -> str:
        """Wait until another control call runs `release`."""
        self._released.clear()
        self._waiting.set()
        try:
            return "released" if self._released.wait(timeout=60) else "timed out"
        finally:
            self._waiting.clear()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_for_message(self) -> str:
        """Wait until another call on the same event loop runs `send_message`."""
        self._message = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(self._message, timeout=60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def send_message(self, text: str) -> bool:
        """Return whether a call was waiting for it."""
        if not hasattr(self, "_message") or self._message.done():
            return False
        self._message.set_result(text)
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def is_waiting(self) -> bool:
        return self._waiting.is_set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def release(self) -> None:
        self._released.set()

    def run_this(self, function: Callable[[], object]) -> object:
        return function()

    def unregistered(self, value: int) -> int:
        return value + self.rank


class CollectiveWorker(Worker):
    """Ranks that run gloo collectives."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self) -> None:
        self.init_process_group()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_total(self, data: DataProto) -> DataProto:
        total = data.batch["x"].sum()
        dist.all_reduce(total)
        data.batch["total"] = total.expand(len(data)).clone()
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def collective_without(self, absent: int, failure: str) -> None:
        """All ranks but one wait in a collective; that one dies or raises."""
        if self.rank == absent:
            time.sleep(0.5)
            if failure == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this rank fails")
        dist.all_reduce(torch.ones(1))


class MeshWorker(Worker):
    """Ranks on a mesh of data-parallel × tensor-parallel."""

    def __init__(self, dp: int, tp: int) -> None:
        self.dp, self.tp = dp, tp
        self.seen: list[int] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, real_mesh: bool = True) -> None:
        if real_mesh:
            self.init_process_group()
            mesh = dist.init_device_mesh("cpu", (self.dp, self.tp), mesh_dim_names=("dp", "tp"))
            self.register_mesh("actor", mesh, dp_dim="dp")
        else:
            self.register_mesh_place("actor", self.rank // self.tp, collect=self.rank % self.tp == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def mark(self, data: DataProto) -> DataProto:
        self.seen = data.batch["x"].tolist()
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_seen(self) -> list[int]:
        return self.seen

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def lost(self, data: DataProto) -> DataProto:
        return data


class RolloutWorker(Worker):
    """Creates and reads batches with the columns of generation and training."""

    def __init__(self, prompt: int = 8, response: int = 16, pad: int = 99) -> None:
        self.prompt, self.response, self.pad = prompt, response, pad

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, tp: int) -> None:
        self.register_mesh_place("rollout", self.rank // tp, collect=self.rank % tp == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate(self, data: DataProto) -> DataProto:
        return rollout_batch(data.batch["seed"].tolist(), self.prompt, self.response, self.pad)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def log_probs(self, data: DataProto) -> DataProto:
        """Per-token values, arbitrary in the padding of responses."""
        return DataProto.from_dict({"old_log_probs": data.batch["responses"].float() * 0.5})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def look(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            non_tensors={
                "row": [
                    {key: value.tolist() for key, value in data[i].batch.items()}
                    | {key: value for key, value in data[i].non_tensor_batch.items()}
                    for i in range(len(data))
                ]
            }
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto) -> dict[str, float]:
        return {"rows": len(data), "tokens": float(data.batch["response_mask"].sum()), "nbytes": data.nbytes}


def rollout_batch(seeds: list[int], prompt: int, response: int, pad: int) -> DataProto:
    """Rows whose lengths and tokens depend on their seed alone."""
    rows = len(seeds)
    prompts, responses = torch.full((rows, prompt), pad), torch.full((rows, response), pad)
    attention = torch.zeros(rows, prompt + response, dtype=torch.long)
    response_mask = torch.zeros(rows, response, dtype=torch.long)
    for i, seed in enumerate(seeds):
        p, r = prompt_length(seed, prompt), response_length(seed, response)
        prompts[i, prompt - p :] = torch.arange(p) + seed * 1000
        responses[i, :r] = torch.arange(r) + seed * 1000 + 500
        attention[i, prompt - p : prompt + r] = 1
        response_mask[i, :r] = 1
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "rollout_log_probs": torch.where(response_mask.bool(), -responses.float(), 0.0).to(torch.bfloat16),
            "rollout_versions": torch.where(response_mask.bool(), responses, -1),
            "score": torch.tensor([float(seed) for seed in seeds]),
        },
        {"uid": np.array([f"u{seed}" for seed in seeds], dtype=object)},
        {"pad": pad},
    )


def prompt_length(seed: int, width: int) -> int:
    return 1 + (seed * 7) % width


def response_length(seed: int, width: int) -> int:
    return (seed * 5) % (width + 1)


class DeviceWorker(Worker):
    """Doubles and sums a column on its device, with a collective."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self) -> str:
        self.init_process_group()
        return str(self.device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def total(self, data: DataProto) -> DataProto:
        data = data.to(self.device)
        data.batch["x"] = data.batch["x"] * 2
        total = data.batch["x"].sum()
        dist.all_reduce(total)
        data.batch["total"] = (total / 2 if "total" in data.batch else total).expand(len(data)).clone()
        return data


class RowSource:
    """An attribute of a worker whose methods are called by path."""

    def pid(self) -> int:
        return os.getpid()

    def double(self, value: int) -> int:
        return 2 * value

    def rows(self, seeds: list[int]) -> tuple[str, DataProto | None]:
        """Return a value and a batch; no seeds: no batch."""
        return f"{len(seeds)} rows", rollout_batch(seeds, 8, 16, 99) if seeds else None

    def fail(self) -> tuple[str, DataProto | None]:
        raise LookupError("no rows here")

    def die(self) -> tuple[str, DataProto | None]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class WithRowSource(Worker):
    """A worker whose batches are read by `RankHandle.call_rows("source.rows", …)`."""

    def __init__(self) -> None:
        self.source = RowSource()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def look(self, data: DataProto) -> DataProto:
        """The columns as this rank received them."""
        return DataProto.from_dict({name: value.clone() for name, value in data.batch.items()})
