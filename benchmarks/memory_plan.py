"""The memory plan against the machine: planned and measured peak of every phase of a GRPO step, by shape.

    python benchmarks/memory_plan.py                    # 0.5B, 1.5B and 7B with random weights: 5 minutes on one H200
    python benchmarks/memory_plan.py --cases tiny       # what a machine without a GPU runs: proves that it works

The worker is the one that `main_ppo` starts, with the same configuration, in a process per case without Ray; rows have
full length. A device's measure is what torch allocated and the rollout engine mapped, as `memory_gb/<phase>` has it,
the plan's the same without context and slack; "reserved" is what torch took of the device, to hold against the plan's
total. The host's measure is how much less memory was available than before the worker was built (the plan's is in the
table printed before). On a CPU the
allocations of torch are added up (those of the rollout engine's own thread are not seen).
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
from verl.config.schema import put
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
    """A shape and its settings; `save`: a checkpoint is written, too; `answers`: how far generation really goes."""

    shape: str
    overrides: tuple[str, ...] = ()
    prompts: int = 32
    n: int = 8
    lengths: tuple[int, int] = (256, 512)
    answers: int = 24
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
    "tiny": Case("tiny", prompts=8, n=4, lengths=(16, 32), answers=8, save=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None, help="which (default: all that fit here)")
    parser.add_argument("--json", default=None, help="append the result to this file")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = options.cases or ([name for name in CASES if name != "tiny"] if torch.cuda.is_available() else ["tiny"])
    if options.alone:
        print("ROWS " + json.dumps(rows_of(wanted[0])), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for name in wanted:  # what one case leaves behind is no part of the next
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
    """Every phase of one case; what cannot be run is a row that says so."""
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
                walk(config, case, Path(folder), measure)
        except (RuntimeError, MemoryError) as error:
            print(error, file=sys.stderr, flush=True)
            measure.note("failed", str(error).splitlines()[0][:80])
    return [{"case": name, **row} for row in measure.rows(plan)]


def configured(case: Case, folder: Path, device: str) -> tuple[PPOConfig, MemoryPlan]:
    """The configuration, with the changes that make its plan fit where it does not; and that plan."""
    given = [
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
    config = load_config(None, given, check_files=False)
    shape = ModelShape.from_folder(str(folder / "model"), config.actor_rollout_ref.model)
    assert shape is not None
    found = gpu_memory() if device == "cuda" else (host_memory_available(), "host memory")
    memory = None if found is None else DeviceMemory(device, *found)

    def plan_of(changed: PPOConfig) -> MemoryPlan:
        return memory_plan(changed, {"actor": shape}, memory, HostMemory(host_memory_available()))

    changes, fits = cheapest_changes(config, plan_of)
    for change in changes:
        print(f"{case.shape}: {change}{'' if fits else ' (still does not fit)'}", flush=True)
        put(config, change.key, change.value)
    return config, plan_of(config)


def walk(config: PPOConfig, case: Case, folder: Path, measure: Measure) -> None:
    """Two steps: from the second update on everything that a run holds is there."""
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
    with steps_apart(measure):
        for step in range(2):
            with measure("update_weights"):
                group.update_rollout_weights(step)
            with measure("gen"):
                group.generate_sequences(prompts, max_new_tokens=case.answers)
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
def steps_apart(measure: Measure) -> Iterator[None]:
    """Within it the optimizer's steps are measured as a phase of their own inside `update_actor`."""
    plain: Callable[..., Any] = FSDPEngine.optimizer_step

    def step(self: FSDPEngine) -> dict[str, float]:
        measure.mark("update_actor: passes")
        found = plain(self)
        measure.mark("update_actor: step")
        return found

    FSDPEngine.optimizer_step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPEngine.optimizer_step = plain  # type: ignore[method-assign]


def batch(case: Case, vocabulary: int) -> DataProto:
    """A step's rows, all of full length, as the trainer sends them."""
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
    """Peaks by phase, the largest of all rounds: of the device, of what torch reserved there, and of the host."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._device_peak: dict[str, float] = {}
        self._reserved: dict[str, float] = {}
        self._host_peak: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._inside: list[str] = []  # parts of the phase that runs
        self._host = _HostWatch()
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
        for part in self._inside:  # the peak of the whole is that of its fullest part
            for found in (self._device_peak, self._reserved, self._host_peak):
                found[phase] = max(found.get(phase, 0.0), found.get(part, 0.0))
        if self._cuda:
            self._after[phase] = memory_in_use(self._device)[1]

    def mark(self, name: str) -> None:
        """What happened since the last mark is called so."""
        self._inside.append(name)
        if self._cuda:
            torch.cuda.synchronize()
            peak, _ = memory_in_use(self._device)
            mapped = peak - torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved() + mapped
            self._device_peak[name] = max(self._device_peak.get(name, 0.0), peak)
            self._reserved[name] = max(self._reserved.get(name, 0.0), reserved)
        self._host_peak[name] = max(self._host_peak.get(name, 0.0), self._host.most())
        self._reset()

    def note(self, phase: str, text: str) -> None:
        self._notes[phase] = text

    def rows(self, plan: MemoryPlan) -> list[dict[str, Any]]:
        """One per phase: planned beside measured."""
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


class _HostWatch:
    """How much less of the host's memory is available than at the start, at most; looked at twenty times a second."""

    def __init__(self) -> None:
        self._before = host_memory_available()
        self._least = self._before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._before = self._least = host_memory_available()
        self._thread.start()

    def most(self) -> float:
        self._least = min(self._least, host_memory_available())
        return float(self._before - self._least)

    def reset(self) -> None:
        self._least = host_memory_available()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self._least = min(self._least, host_memory_available())


def _peaks_by_mark(profiler: Any) -> dict[str, float]:
    """The most that torch had allocated on the CPU within each phase, from a profile of the whole run."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix("phase:"))
        for event in events
        if event.name().startswith("phase:")
    ]
    found: dict[str, float] = {}
    held = 0
    for event in events:
        if event.name() != "[memory]":
            continue
        held += event.nbytes()
        at = event.start_ns()
        phase = next((name for begin, end, name in spans if begin <= at <= end), None)
        if phase is not None:
            found[phase] = max(found.get(phase, 0.0), held)
    return found


if __name__ == "__main__":
    main()
