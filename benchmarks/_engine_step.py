"""The training engine alone, in one process without Ray: update and log-prob pass of the real worker.

The worker and its configuration are those of `main_ppo`, without the controller. Response lengths are those of the
second step of the schedule (`Work.lengths`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _shapes import release_memory, synchronise
from _training_work import Work

from verl.config import load_config
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.fsdp_workers import ActorRolloutRefWorker

STEP = 1
# Parts of kernel names by category; the first match counts.
KERNEL_CATEGORIES = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "vocabulary head": ("_row_statistics", "_logit_gradients", "softmax", "logsumexp"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "mm"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "elementwise": ("elementwise", "reduce", "vectorized", "triton"),
}


def batch(work: Work) -> DataProto:
    """The batch of a step as the trainer sends it: [prompt | response], responses padded on the right."""
    generator = torch.Generator().manual_seed(work.seed)
    lengths = torch.tensor(work.lengths(STEP).ravel())
    rows, width = work.samples, int(lengths.max())
    vocabulary = work.model_config().vocab_size
    ids = torch.randint(2, vocabulary, (rows, work.prompt_length + width), generator=generator)
    ids[:, : work.prompt_length] = ids[:: work.n, : work.prompt_length].repeat_interleave(work.n, dim=0)
    mask = (torch.arange(width) < lengths[:, None]).long()
    attention = torch.cat([torch.ones(rows, work.prompt_length, dtype=torch.long), mask], dim=1)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    response = {
        "old_log_probs": torch.randn(rows, width, generator=generator).abs().neg() - 10,
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
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
    """The actor worker of one variant, in this process."""

    def __init__(self, work: Work, folder: Path, overrides: list[str]) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        arguments = [
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
        config = load_config(None, arguments, check_files=False).actor_rollout_ref
        # With `old_log_prob_from_update`, the forward pass of the update computes the old log-probs.
        self.omitted_columns = ["old_log_probs"] if config.actor.old_log_prob_from_update else []
        self.group: Any = LocalWorkerGroup(
            ray_cls_with_init=ClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor"),
            device_name=self.device,
        )
        self.group.init_model()

    def select_inputs(self, data: DataProto) -> DataProto:
        """The columns that the trainer would send to the worker."""
        return data.select([name for name in data.batch.keys() if name not in self.omitted_columns])

    def measure(self, method: Callable[[DataProto], Any], data: DataProto, repeats: int) -> tuple[float, float]:
        """Return (best seconds, peak GB) over `repeats` calls, after a warm-up call that compiles and allocates."""
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
        release_memory(self.device)


def measure_variant(
    work: Work, folder: Path, variant: str, overrides: list[str], rate: float, repeats: int
) -> list[dict[str, Any]]:
    """Rows of the update and of the log-prob pass of a variant; a variant that fails gives a row with a note."""
    data = batch(work)
    forward = work.forward_flops(STEP)
    labels = {"system": "verl engine", "variant": variant, "case": work.case, "shape": work.shape}
    begin, engine = time.monotonic(), None
    rows: list[dict[str, Any]] = []
    try:
        engine = Engine(work, folder, overrides)
        calls = {"update_actor": (engine.group.update_actor, 3), "log_prob": (engine.group.compute_log_prob, 1)}
        for phase, (method, passes) in calls.items():
            seconds, peak = engine.measure(method, engine.select_inputs(data), repeats)
            rows.append(
                {
                    **labels,
                    "phase": phase,
                    "s": seconds,
                    "tokens/s": work.tokens(STEP) / seconds,
                    "MFU": passes * forward / seconds / rate,
                    "peak GB": peak or None,
                    "note": f"{time.monotonic() - begin:.0f} s with set-up",
                }
            )
    except Exception as error:  # noqa: BLE001 - the failure becomes a row of the table
        print(error, file=sys.stderr, flush=True)
        note = "out of memory" if "out of memory" in str(error) else f"{type(error).__name__} (see above)"
        rows.append({**labels, "phase": "update_actor", "note": note})
    finally:
        if engine is not None:
            engine.close()
    return rows


def profile(work: Work, folder: Path, overrides: list[str], samples: int) -> list[dict[str, Any]]:
    """Profile an update of `samples` rows."""
    engine = Engine(work, folder, overrides)
    try:
        data = engine.select_inputs(batch(work).select_idxs(list(range(samples))))
        return profile_calls(lambda: engine.group.update_actor(data), engine.device)
    finally:
        engine.close()


def profile_calls(run: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """Time of the second call of `run` by kernel (GPU) or operator (CPU): totals per category, then the longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cuda = device == "cuda"
    run()
    synchronise(device)
    with profiler(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler_run:
        start = time.perf_counter()
        run()
        synchronise(device)
        wall = time.perf_counter() - start
    kernels = [
        (event.self_device_time_total if cuda else event.self_cpu_time_total, event.key, event.count)
        for event in profiler_run.key_averages()
    ]
    kernels.sort(reverse=True)
    totals: dict[str, float] = {}
    for microseconds, name, _ in kernels:
        totals[_category(name)] = totals.get(_category(name), 0.0) + microseconds
    totals["(idle)" if cuda else "(outside of operators)"] = max(0.0, wall * 1e6 - sum(totals.values()))
    table: list[dict[str, Any]] = [
        {"kernel": f"all {category}", "ms": us / 1e3, "share": us / 1e6 / wall} for category, us in totals.items()
    ]
    table.sort(key=lambda row: -row["ms"])
    return table + [
        {"kernel": name[:70], "ms": us / 1e3, "share": us / 1e6 / wall, "calls": count}
        for us, name, count in kernels[:16]
    ]


def _category(kernel: str) -> str:
    name = kernel.lower()
    return next((category for category, parts in KERNEL_CATEGORIES.items() if any(p in name for p in parts)), "other")
