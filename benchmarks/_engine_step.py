"""The training engine alone, in one process without Ray: update and log-prob pass of the real worker.

The worker is the one that `main_ppo` starts, with the same configuration; only the controller is missing. Lengths are
those of the second step of the work's schedule.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _shapes import synchronise
from _training_work import Work

from verl.config import load_config
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.fsdp_workers import ActorRolloutRefWorker

STEP = 1
# What a kernel's name tells of its purpose, the first that fits.
KERNEL_KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "vocabulary head": ("_row_statistics", "_logit_gradients", "softmax", "logsumexp"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "mm"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "elementwise": ("elementwise", "reduce", "vectorized", "triton"),
}


def batch(work: Work) -> DataProto:
    """A step's rows as the trainer sends them: prompts on the left, answers of the schedule's lengths."""
    draw = torch.Generator().manual_seed(work.seed)
    lengths = torch.tensor(work.lengths(STEP).ravel())
    rows, width = work.samples, int(lengths.max())
    vocabulary = work.model_config().vocab_size
    ids = torch.randint(2, vocabulary, (rows, work.prompt_length + width), generator=draw)
    mask = (torch.arange(width) < lengths[:, None]).long()
    attention = torch.cat([torch.ones(rows, work.prompt_length, dtype=torch.long), mask], dim=1)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    response = {
        "old_log_probs": torch.randn(rows, width, generator=draw).abs().neg() - 10,
        "advantages": torch.randn(rows, 1, generator=draw).expand(rows, width).contiguous(),
    }
    tensors = {
        "prompts": ids[:, : work.prompt_length],
        "responses": ids[:, work.prompt_length :] * mask,
        "input_ids": ids * attention,
        "attention_mask": attention,
        "position_ids": positions,
        "response_mask": mask,
        **{name: value * mask for name, value in response.items()},
    }
    meta = {"temperature": 1.0, "mini_batches": 1, "global_steps": 1}
    return DataProto.from_dict(tensors, meta_info=meta)


class Engine:
    """The actor of one variant, in this process."""

    def __init__(self, work: Work, folder: Path, overrides: list[str]) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        given = [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder / f'{work.case}.parquet'}",
            f"data.train_batch_size={work.prompts}",
            f"data.max_prompt_length={work.prompt_length}",
            f"data.max_response_length={work.longest}",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"actor_rollout_ref.rollout.n={work.n}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
            "trainer.n_gpus_per_node=1",
            f"trainer.device={self.device}",
            *overrides,
        ]
        config = load_config(None, given, check_files=False).actor_rollout_ref
        # The trainer sends none where the update's own forward pass gives them.
        self.unsent = ["old_log_probs"] if config.actor.old_log_prob_from_update else []
        self.group: Any = LocalWorkerGroup(
            ray_cls_with_init=ClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor"),
            device_name=self.device,
        )
        self.group.init_model()

    def sent(self, data: DataProto) -> DataProto:
        """What the trainer would send of a batch."""
        return data.select([name for name in data.batch.keys() if name not in self.unsent])

    def timed(self, method: Callable[[DataProto], Any], data: DataProto, repeats: int) -> tuple[float, float]:
        """(best seconds, peak GB) after a first call that compiles and allocates."""
        method(data)
        self.group.memory_gb()
        best = float("inf")
        for _ in range(repeats):
            synchronise(self.device)
            start = time.perf_counter()
            method(data)
            synchronise(self.device)
            best = min(best, time.perf_counter() - start)
        return best, max(peak for peak, _ in self.group.memory_gb())

    def close(self) -> None:
        self.group.shutdown()
        del self.group
        gc.collect()
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def rows(
    work: Work, folder: Path, variant: str, overrides: list[str], rate: float, repeats: int
) -> list[dict[str, Any]]:
    """Update and log-prob pass of a variant."""
    data = batch(work)
    forward = work.forward_flops(STEP)
    head = {"system": "verl engine", "variant": variant, "case": work.case, "shape": work.shape}
    begin, engine = time.monotonic(), None
    found: list[dict[str, Any]] = []
    try:
        engine = Engine(work, folder, overrides)
        calls = {"update_actor": (engine.group.update_actor, 3), "log_prob": (engine.group.compute_log_prob, 1)}
        for phase, (method, passes) in calls.items():
            seconds, peak = engine.timed(method, engine.sent(data), repeats)
            found.append(
                {
                    **head,
                    "phase": phase,
                    "s": seconds,
                    "tokens/s": work.tokens(STEP) / seconds,
                    "MFU": passes * forward / seconds / rate,
                    "peak GB": peak or None,
                    "note": f"{time.monotonic() - begin:.0f} s with set-up",
                }
            )
    except Exception as error:  # noqa: BLE001 - a variant that cannot run is a row that says so
        print(error, file=sys.stderr, flush=True)
        note = "out of memory" if "out of memory" in str(error) else f"{type(error).__name__} (see above)"
        found.append({**head, "phase": "update_actor", "note": note})
    finally:
        if engine is not None:
            engine.close()
    return found


def profile(work: Work, folder: Path, overrides: list[str], samples: int) -> list[dict[str, Any]]:
    """Where the time of an update of `samples` rows goes."""
    engine = Engine(work, folder, overrides)
    try:
        part = engine.sent(batch(work).select_idxs(list(range(samples))))
        return profiled(lambda: engine.group.update_actor(part), engine.device)
    finally:
        engine.close()


def profiled(run: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """Where the time of a second `run` goes: kernels (GPU) or operators (CPU), by kind and by name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cuda = device == "cuda"
    run()
    synchronise(device)
    with profiler(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        run()
        synchronise(device)
        whole = time.perf_counter() - start
    spent = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e.key, e.count) for e in seen.key_averages()]
    spent.sort(reverse=True)
    kinds: dict[str, float] = {}
    for microseconds, name, _ in spent:
        kinds[_kind(name)] = kinds.get(_kind(name), 0.0) + microseconds
    kinds["(nothing ran)" if cuda else "(outside of operators)"] = max(0.0, whole * 1e6 - sum(kinds.values()))
    table: list[dict[str, Any]] = [
        {"what": f"all {kind}", "ms": us / 1e3, "share": us / 1e6 / whole} for kind, us in kinds.items()
    ]
    table.sort(key=lambda row: -row["ms"])
    return table + [
        {"what": name[:70], "ms": us / 1e3, "share": us / 1e6 / whole, "calls": count} for us, name, count in spent[:16]
    ]


def _kind(name: str) -> str:
    small = name.lower()
    return next((kind for kind, parts in KERNEL_KINDS.items() if any(part in small for part in parts)), "other")
