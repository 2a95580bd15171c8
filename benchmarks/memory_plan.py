"""Planned and measured peak memory of every phase of a GRPO step, by model shape.

    python benchmarks/memory_plan.py                    # 0.5B, 1.5B and 7B with random weights: 5 minutes on one H200
    python benchmarks/memory_plan.py --cases tiny       # without a GPU: checks that the benchmark runs

The worker is that of `main_ppo`, with the same configuration, in a process per case without Ray; rows have the maximum
length. Measured on a device: memory allocated by torch and mapped by the rollout engine, as in `memory_gb/<phase>`,
compared with the plan without context and fragmentation; "reserved" is the memory reserved by torch, comparable with
the plan's total. Measured on the host: the decrease of available memory since before the worker was created (the plan
is in the table printed before). On a CPU the allocations of torch are summed (without those of the rollout engine's
thread).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _report import report
from _shapes import save_random_model, shape_config

from verl.config import PPOConfig, load_config
from verl.config.devices import gpu_memory, host_memory_available
from verl.config.schema import set_path
from verl.planning.advice import cheapest_changes
from verl.planning.host import HostMemory
from verl.planning.phases import GB, DeviceMemory, MemoryPlan
from verl.planning.plan import memory_plan
from verl.planning.shapes import ModelShape
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.device import memory_in_use
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.fsdp_workers import ActorRolloutRefWorker

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Case:
    """A model shape and its settings; `save`: also write a checkpoint; `new_tokens`: tokens that are generated."""

    shape: str
    overrides: tuple[str, ...] = ()
    prompts: int = 32
    n: int = 8
    lengths: tuple[int, int] = (256, 512)
    new_tokens: int = 24
    save: bool = False


_PLAIN = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=15360",  # twenty rows of full length
)
_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=7680")
CASES = {
    "0.5b": Case("qwen2.5-0.5b", save=True),
    "0.5b, no checkpointing": Case("qwen2.5-0.5b", _PLAIN),
    "1.5b": Case("qwen2.5-1.5b"),
    "7b": Case("qwen2.5-7b", _BUDGET),
    "tiny": Case("tiny", prompts=8, n=4, lengths=(16, 32), new_tokens=8, save=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=None, help="names of cases (default: all for a GPU, tiny without)"
    )
    parser.add_argument("--json", default=None, help="append the result to this file")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.cases or ([name for name in CASES if name != "tiny"] if torch.cuda.is_available() else ["tiny"])
    if options.alone:
        print("ROWS " + json.dumps(rows_of(names[0])), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for name in names:  # in a new process, so that cases do not affect each other
        begin = time.monotonic()
        command = [sys.executable, __file__, "--alone", "--cases", name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                if line.startswith("ROWS "):
                    rows += json.loads(line.removeprefix("ROWS "))
                else:
                    print(line, end="", flush=True)
        print(f"{name}: {time.monotonic() - begin:.0f} s, exit code {process.returncode}", flush=True)
    report("memory plan: planned against measured peak, GB", rows, options.json)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return a row per phase of a case; if it fails, also a row with the error."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        save_random_model(Path(folder) / "model", shape_config(case.shape, pad_token_id=0), dtype, device)
        config, plan = configured(case, Path(folder), device)
        print(f"\n{name}\n{plan.render()}", flush=True)
        measure = Measure(torch.device(device))
        try:
            with measure:
                run_steps(config, case, Path(folder), measure)
        except (RuntimeError, MemoryError) as error:
            print(error, file=sys.stderr, flush=True)
            measure.note("failed", str(error).splitlines()[0][:80])
    return [{"case": name, **row} for row in measure.rows(plan)]


def configured(case: Case, folder: Path, device: str) -> tuple[PPOConfig, MemoryPlan]:
    """Return the configuration, with the changes that make its plan fit, and the plan."""
    overrides = [
        "algorithm.adv_estimator=grpo",
        "data.train_files=x",
        f"data.train_batch_size={case.prompts}",
        f"data.max_prompt_length={case.lengths[0]}",
        f"data.max_response_length={case.lengths[1]}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.n={case.n}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"{ACTOR}.ppo_mini_batch_size={case.prompts}",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={device}",
        *case.overrides,
    ]
    config = load_config(None, overrides, check_files=False)
    shape = ModelShape.from_folder(str(folder / "model"), config.actor_rollout_ref.model)
    assert shape is not None
    available = gpu_memory() if device == "cuda" else (host_memory_available(), "host memory")
    memory = None if available is None else DeviceMemory(device, *available)

    def plan_of(changed: PPOConfig) -> MemoryPlan:
        return memory_plan(changed, {"actor": shape}, memory, HostMemory(host_memory_available()))

    changes, fits = cheapest_changes(config, plan_of)
    for change in changes:
        print(f"{case.shape}: {change}{'' if fits else ' (still does not fit)'}", flush=True)
        set_path(config, change.key, change.value)
    return config, plan_of(config)


def run_steps(config: PPOConfig, case: Case, folder: Path, measure: Measure) -> None:
    """Run two steps: all memory of a run is allocated from the second update on."""
    policy = config.actor_rollout_ref
    with measure("load"):
        group: Any = LocalWorkerGroup(
            ray_cls_with_init=ClassWithInitArgs(ActorRolloutRefWorker, config=policy, role="actor_rollout"),
            device_name=config.trainer.device,
        )
        group.init_model()
    data = batch(case, shape_config(case.shape).vocab_size)
    prompts = data.select(["prompts", "prompt_mask"]).rename(
        ["prompts", "prompt_mask"], ["input_ids", "attention_mask"]
    )
    prompts.meta_info = {"step": 1, "seed": 1, "eos_token_id": [1], "pad_token_id": 0}
    update = data.select([key for key in data.batch.keys() if key != "prompt_mask"])
    with optimizer_steps_measured(measure):
        for step in range(2):
            with measure("update_weights"):
                group.update_rollout_weights(step)
            with measure("gen"):
                group.generate_sequences(prompts, max_new_tokens=case.new_tokens)
            if policy.rollout.free_weights:
                group.free_rollout_weights()
            with measure("old_log_prob"):
                group.compute_log_prob(update)
            with measure("update_actor"):
                group.update_actor(update)
    if case.save:
        with measure("save_checkpoint"):
            group.save_checkpoint(str(folder / "step"))
    group.shutdown()


@contextmanager
def optimizer_steps_measured(measure: Measure) -> Iterator[None]:
    """Context in which optimizer steps are measured separately from the passes of `update_actor`."""
    original: Callable[..., Any] = FSDPEngine.optimizer_step

    def step(self: FSDPEngine) -> dict[str, float]:
        measure.mark("update_actor: passes")
        metrics = original(self)
        measure.mark("update_actor: step")
        return metrics

    FSDPEngine.optimizer_step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPEngine.optimizer_step = original  # type: ignore[method-assign]


def batch(case: Case, vocabulary: int) -> DataProto:
    """Return the rows of a step, all of maximum length, as the trainer sends them."""
    rows, (before, after) = case.prompts * case.n, case.lengths
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocabulary, (rows, before + after), generator=draw)
    ones = torch.ones_like(ids)
    tensors = {
        "prompts": ids[:, :before],
        "prompt_mask": ones[:, :before],
        "responses": ids[:, before:],
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(1) - 1,
        "response_mask": ones[:, before:],
        "old_log_probs": torch.full((rows, after), -12.0),
        "advantages": torch.randn(rows, 1, generator=draw).expand(rows, after).contiguous(),
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, "mini_batches": 1, "global_steps": 1})


class Measure:
    """Peak memory by phase over all steps: on the device, reserved by torch, and on the host."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._device_peak: dict[str, float] = {}
        self._reserved: dict[str, float] = {}
        self._host_peak: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._inside: list[str] = []  # parts of the current phase
        self._host = _HostMonitor()
        self._profiler: Any = nullcontext()
        if not self._cuda:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            )

    def __enter__(self) -> Measure:
        self._profiler.__enter__()
        self._host.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._host.close()
        self._profiler.__exit__(None, None, None)
        if not self._cuda:
            self._device_peak = _peaks_by_mark(self._profiler)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._reset()
        self._inside = []
        with torch.profiler.record_function(f"phase:{phase}"):
            yield
        self.mark(phase)
        for part in self._inside:  # the peak of a phase is that of its largest part
            for peaks in (self._device_peak, self._reserved, self._host_peak):
                peaks[phase] = max(peaks.get(phase, 0.0), peaks.get(part, 0.0))
        if self._cuda:
            self._after[phase] = memory_in_use(self._device)[1]

    def mark(self, name: str) -> None:
        """Record the peaks since the last mark under `name`."""
        self._inside.append(name)
        if self._cuda:
            torch.cuda.synchronize()
            peak, _ = memory_in_use(self._device)
            mapped = peak - torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved() + mapped
            self._device_peak[name] = max(self._device_peak.get(name, 0.0), peak)
            self._reserved[name] = max(self._reserved.get(name, 0.0), reserved)
        self._host_peak[name] = max(self._host_peak.get(name, 0.0), self._host.peak())
        self._reset()

    def note(self, phase: str, text: str) -> None:
        self._notes[phase] = text

    def rows(self, plan: MemoryPlan) -> list[dict[str, Any]]:
        """Return one row per phase with planned and measured memory."""
        planned = {phase.phase: phase for phase in plan.phases if not phase.on_host}
        names = [*self._host_peak, *(name for name in self._notes if name not in self._host_peak)]
        return [self._row(name, planned.get(name)) for name in names]

    def _row(self, name: str, planned: Any) -> dict[str, Any]:
        def gb(size: float | None) -> float | None:
            return None if size is None else size / GB

        measured = self._device_peak.get(name)
        return {
            "phase": name,
            "planned": gb(planned.allocated) if planned else None,
            "measured": gb(measured),
            "ratio": planned.allocated / measured if planned and measured else None,
            "planned total": gb(planned.total) if planned else None,
            "reserved": gb(self._reserved.get(name)),
            "after": gb(self._after.get(name)),
            "host": gb(self._host_peak.get(name)),
            "note": self._notes.get(name),
        }

    def _reset(self) -> None:
        self._host.reset()
        if self._cuda:
            torch.cuda.synchronize()
            memory_in_use(self._device, reset=True)


class _HostMonitor:
    """Maximum decrease of available host memory since the start, sampled twenty times per second."""

    def __init__(self) -> None:
        self._before = host_memory_available()
        self._lowest = self._before
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        self._before = self._lowest = host_memory_available()
        self._thread.start()

    def peak(self) -> float:
        self._lowest = min(self._lowest, host_memory_available())
        return float(self._before - self._lowest)

    def reset(self) -> None:
        self._lowest = host_memory_available()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(0.05):
            self._lowest = min(self._lowest, host_memory_available())


def _peaks_by_mark(profiler: Any) -> dict[str, float]:
    """Return the peak of torch's CPU allocations in each phase, from a profile of the whole run."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix("phase:"))
        for event in events
        if event.name().startswith("phase:")
    ]
    peaks: dict[str, float] = {}
    allocated = 0
    for event in events:
        if event.name() != "[memory]":
            continue
        allocated += event.nbytes()
        at = event.start_ns()
        phase = next((name for begin, end, name in spans if begin <= at <= end), None)
        if phase is not None:
            peaks[phase] = max(peaks.get(phase, 0.0), allocated)
    return peaks


if __name__ == "__main__":
    main()
