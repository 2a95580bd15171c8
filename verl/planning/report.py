"""The report of `verl plan`: memory, changes that make a run fit, the largest sizes, seconds and checkpoints."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.config.ppo import PPOConfig
from verl.config.schema import get_path, set_path
from verl.planning.advice import (
    UNCERTAINTY,
    LargestModel,
    LargestValue,
    Load,
    MemoryChange,
    apply_memory_settings,
    cheapest_changes,
    largest_batch,
    largest_length,
    largest_model,
)
from verl.planning.catalog import GPU, MEASURED_GPU
from verl.planning.host import HostMemory
from verl.planning.phases import GB, ROLE_OF_PHASE, DeviceMemory, MemoryPlan, PhaseMemory, format_table
from verl.planning.plan import memory_plan, supervised_memory_plan
from verl.planning.seconds import MeanLengths, PhaseSeconds, step_seconds, supervised_seconds, total_seconds
from verl.planning.shapes import ModelShape

# Explanations of phases and columns in the tables whose names are not self-explanatory.
_PHASE_TEXTS = {
    "gen": "generation",
    "old_log_prob": "log-probs before the update",
    "ref": "log-probs of the reference",
    "values": "values of the critic",
    "update_actor": "forward, backward and optimizer step",
    "sft": "forward, backward and optimizer step",
    "sft_answers": "generation for validation",
    "train": "a step",
    "sft_train": "a step",
}
_PART_TEXTS = {
    "gathered": "weights of layers in use, gathered from all ranks",
    "head": "logits",
    "rollout": "weights and KV cache of the rollout engine",
    "judge": "served reward model",
    "context": "CUDA",
    "processes": "Python processes",
    "snapshot": "copy of the checkpoint that is written during training",
    "copies": "buffers for writing a checkpoint",
    "files": "checkpoints in a memory file system",
    "batches": "rows of a step",
}
# Bytes per second of a disk with checksums (docs/results.md, Checkpoints: 0.8 to 1.1 GB/s).
_DISK = 1e9


@dataclass(frozen=True)
class PlannedRun:
    """A run and the hardware that it is planned for."""

    config: Any
    load: Load
    shapes: Mapping[str, ModelShape]
    """By role as in `memory_plan`; of a supervised run under `actor`."""
    gpu: GPU | None
    """None: the run uses CPUs."""
    device: DeviceMemory | None
    host: HostMemory | None
    lengths: MeanLengths = field(default_factory=MeanLengths)
    notes: tuple[str, ...] = ()

    def plan_with(self, config: Any, shapes: Mapping[str, ModelShape]) -> MemoryPlan:
        if isinstance(config, PPOConfig):
            return memory_plan(config, shapes, self.device, self.host)
        return supervised_memory_plan(config, shapes["actor"], self.device, self.host)

    def plan(self, config: Any) -> MemoryPlan:
        return self.plan_with(config, self.shapes)

    def seconds(self, config: Any) -> list[PhaseSeconds]:
        if self.gpu is None:
            return []
        if isinstance(config, PPOConfig):
            return step_seconds(config, self.shapes, self.plan(config), self.gpu, self.lengths)
        tokens = [length for length in (self.lengths.prompt, self.lengths.response) if length]
        return supervised_seconds(config, self.shapes["actor"], self.gpu, sum(tokens) or None)

    def replaceable_roles(self) -> dict[str, tuple[str, int]]:
        """Return kind and LoRA rank of the roles whose model is that of the actor, by role."""
        config = self.config
        if not isinstance(config, PPOConfig):
            return {"actor": (config.model_kind, config.model.lora_rank)}
        policy, critic = config.actor_rollout_ref.model, config.critic.model
        roles = {"actor": ("causal_lm", policy.lora_rank)}
        if "critic" in self.shapes and critic.path == policy.path:
            roles["critic"] = ("value", critic.lora_rank)
        return roles


@dataclass(frozen=True)
class ChangeCost:
    """A change on top of those before it, and the seconds of a step before and after it; None: unknown."""

    change: MemoryChange
    seconds_before: float | None
    seconds: float | None


@dataclass(frozen=True)
class PlanReport:
    """The result of `verl plan`."""

    run: PlannedRun
    plan: MemoryPlan
    automatic: tuple[MemoryChange, ...]
    """Changes that the run makes by itself (`trainer.auto_memory`); all other values are those with them."""
    changes: tuple[ChangeCost, ...]
    fits_with_changes: bool
    batch: LargestValue
    length: LargestValue
    model: LargestModel
    phases: tuple[PhaseSeconds, ...]
    step_seconds: float | None

    @property
    def verdict(self) -> str:
        """`fits`, `tight` (within the uncertainty of the plan: the run starts with a warning), or `too large`."""
        if not self.plan.excess:
            return "fits"
        phases = [phase for phase in self.plan.phases if phase.capacity is not None]
        within = all(phase.total * (1 - UNCERTAINTY) <= (phase.capacity or 0) for phase in phases)
        return "tight" if within else "too large"


def plan_report(run: PlannedRun) -> PlanReport:
    """Compute the report of a run."""
    automatic = apply_memory_settings(run.config, run.plan)
    plan = run.plan(run.config)
    changes, fits = cheapest_changes(run.config, run.plan) if plan.excess else ([], True)
    phases = run.seconds(run.config)
    settings = [f"{change.key}={_override_value(change.value)}" for change in (*automatic, *changes) if fits]

    def load(more: Sequence[str]) -> Any:
        return run.load([*settings, *more])

    return PlanReport(
        run=run,
        plan=plan,
        automatic=tuple(automatic),
        changes=tuple(_with_costs(run, changes)),
        fits_with_changes=fits,
        batch=largest_batch(run.config, load, run.plan),
        length=largest_length(run.config, run.shapes["actor"].positions, load, run.plan),
        model=largest_model(run.config, run.shapes, run.replaceable_roles(), run.plan_with),
        phases=tuple(phases),
        step_seconds=total_seconds(run.config, phases) if phases else None,
    )


def _override_value(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _with_costs(run: PlannedRun, changes: Sequence[MemoryChange]) -> list[ChangeCost]:
    def seconds(config: Any) -> float | None:
        phases = run.seconds(config)
        return total_seconds(config, phases) if phases else None

    config = copy.deepcopy(run.config)
    times = [seconds(config)]
    for change in changes:
        set_path(config, change.key, change.value)
        times.append(seconds(config))
    return [ChangeCost(change, times[index], times[index + 1]) for index, change in enumerate(changes)]


# ---------------------------------------------------------------- JSON


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Return the report as plain values; sizes in GB of 2^30 bytes."""
    run, plan = report.run, report.plan
    return {
        "verdict": report.verdict,
        "fits": report.verdict == "fits",
        "gpu": None if run.gpu is None else run.gpu.name,
        "device_gb": _gb(plan.device.total) if plan.device else None,
        "gpus_per_node": run.config.trainer.n_gpus_per_node,
        "nodes": run.config.trainer.nnodes,
        "phases": [_phase_dict(phase) for phase in plan.phases],
        "roles": [
            {
                "role": role.role,
                "pool": role.pool,
                "ranks": role.ranks,
                "parameters": role.parameters,
                "trained_parameters": role.trained_parameters,
                **{f"{name}_gb": _gb(getattr(role, name)) for name in ("weights", "optimizer", "gradients")},
            }
            for role in plan.roles
        ],
        "automatic": {change.key: change.value for change in report.automatic},
        "changes": [_change_dict(cost) for cost in report.changes],
        "fits_with_changes": report.fits_with_changes,
        "largest": {
            "batch": vars(report.batch),
            "length": vars(report.length),
            "model": {
                "as_configured": report.model.as_configured,
                "with_changes": report.model.with_changes,
                "changes": {change.key: change.value for change in report.model.changes},
            },
        },
        "seconds": {phase.phase: {"seconds": phase.seconds, "measured": phase.measured} for phase in report.phases},
        "step_seconds": report.step_seconds,
        "checkpoint_gb": {block or "model": _gb(size) for block, size in plan.checkpoint.items()},
        "notes": list(run.notes),
    }


def _phase_dict(phase: PhaseMemory) -> dict[str, Any]:
    return {
        "phase": phase.phase,
        "role": _role_of(phase),
        "location": "host" if phase.on_host else "device",
        "pool": phase.pool,
        "parts_gb": {name: _gb(size) for name, size in phase.parts.items() if size},
        "total_gb": _gb(phase.total),
        "capacity_gb": None if phase.capacity is None else _gb(phase.capacity),
        "excess_gb": _gb(phase.excess),
    }


def _change_dict(cost: ChangeCost) -> dict[str, Any]:
    change = cost.change
    return {
        "key": change.key,
        "before": change.before,
        "value": change.value,
        "phase": change.phase,
        "before_gb": _gb(change.total_before),
        "gb": _gb(change.total_after),
        "cost": change.remedy.cost,
        "changes_training": change.remedy.changes_training,
        "step_seconds_before": cost.seconds_before,
        "step_seconds": cost.seconds,
    }


def _role_of(phase: PhaseMemory) -> str:
    return "all" if phase.on_host else ROLE_OF_PHASE.get(phase.phase, "model")


def _gb(size: float) -> float:
    return round(size / GB, 3)


# ---------------------------------------------------------------- text


def render(report: PlanReport) -> str:
    """Return the report as text for a terminal."""
    memory = report.plan.render().splitlines()
    sections = [_legend, _role_text, _changes_text, _largest_text, _seconds_text, _checkpoint_text]
    blocks = [_verdict_text(report), memory, *(section(report) for section in sections)]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _verdict_text(report: PlanReport) -> list[str]:
    run, plan, worst = report.run, report.plan, report.plan.worst_phase
    trainer = run.config.trainer
    nodes = f"{trainer.nnodes} node{'s' * (trainer.nnodes > 1)}"
    hardware = f"{nodes} x {trainer.n_gpus_per_node} x {plan.device.name if plan.device else 'device'}"
    verdict = {"fits": "fits", "tight": "may just fit", "too large": "does not fit"}[report.verdict]
    uncertain = f", within the uncertainty of the plan ({UNCERTAINTY:.0%})" if report.verdict == "tight" else ""
    capacity = "" if worst.capacity is None else f" of {worst.capacity / GB:.1f} GB"
    need = f"{worst.phase} takes {worst.total / GB:.1f}{capacity} of {worst.location}{uncertain}"
    return [
        f"The run {verdict} on {hardware}: {need}.",
        *(f"Set by trainer.auto_memory: {change.log_text()}." for change in report.automatic),
        *(f"Note: {note}" for note in run.notes),
    ]


def _legend(report: PlanReport) -> list[str]:
    """Explain the phases and columns that the tables show."""
    phases = report.plan.phases
    parts = {name for phase in phases for name in phase.shown_parts}
    names = [phase.phase for phase in phases]
    lines: list[str] = []
    for title, texts, shown in (("phases", _PHASE_TEXTS, names), ("columns", _PART_TEXTS, parts)):
        explained = "; ".join(f"{name}: {text}" for name, text in texts.items() if name in shown)
        lines += textwrap.wrap(f"{title}: {explained}", 110, initial_indent="  ", subsequent_indent="    ")
    return lines


def _role_text(report: PlanReport) -> list[str]:
    rows = [["role", "pool", "ranks", "parameters", "trained", "weights", "optimizer", "gradients"]]
    for role in report.plan.roles:
        sizes = (role.weights, role.optimizer, role.gradients)
        counts = (f"{role.parameters / 1e9:.2f} B", f"{role.trained_parameters / 1e9:.3f} B")
        rows.append([role.role, role.pool, str(role.ranks), *counts, *(f"{size / GB:.2f}" for size in sizes)])
    return ["State of each role: GB per device (gradients during its update)", *format_table(rows)]


def _changes_text(report: PlanReport) -> list[str]:
    if not report.plan.excess:
        return []
    fits = "Cheapest changes that make it fit" if report.fits_with_changes else "Changes that help, but are not enough"
    lines = [f"{fits} (each on top of those before):"]
    for number, cost in enumerate(report.changes, start=1):
        change = cost.change
        memory = f"{change.phase} {change.total_before / GB:.1f} -> {change.total_after / GB:.1f} GB"
        seconds = ""
        if cost.seconds is not None and cost.seconds_before is not None:
            seconds = f", step {cost.seconds_before:.1f} -> {cost.seconds:.1f} s"
        lines.append(f"  {number}) {change.key}={change.value} (now {change.before}): {memory}{seconds}")
        lines.append(f"     costs: {change.remedy.cost}")
    if not report.fits_with_changes:
        lines.append("  Use more or larger devices, a host with more memory, or a smaller model.")
        lines += _lora_hint(report)
    return lines


def _lora_hint(report: PlanReport) -> list[str]:
    """Return the override that trains adapters; nothing if they are trained, or the engine does not support them."""
    config = report.run.config
    is_ppo = isinstance(config, PPOConfig)
    block = "actor_rollout_ref.model" if is_ppo else "model"
    strategy = config.actor_rollout_ref.actor.strategy if is_ppo else config.strategy
    if get_path(config, f"{block}.lora_rank") or strategy == "megatron":
        return []
    return [f"  Or train adapters only (LoRA, which changes the training): plan it with {block}.lora_rank=32."]


def _largest_text(report: PlanReport) -> list[str]:
    changed = report.changes and report.fits_with_changes
    lines = [f"Largest values that fit, all other keys {'changed as above' if changed else 'unchanged'}:"]
    for largest in (report.batch, report.length):
        value = "none fits" if largest.value is None else f"{largest.value}"
        at_limit = f", limited by {largest.reason}" if largest.value == largest.limit else ""
        lines.append(f"  {largest.key}: {value} (now {largest.now}{at_limit})")
    model = report.model
    lines.append(
        f"  model: {model.as_configured or f'none of {model.tried[0]} and larger'} with the settings of the run"
    )
    if model.with_changes is not None and model.with_changes != model.as_configured:
        settings = " ".join(f"{change.key}={change.value}" for change in model.changes)
        lines.append(f"         {model.with_changes} with {settings}")
    return lines


def _seconds_text(report: PlanReport) -> list[str]:
    if not report.phases or report.step_seconds is None:
        return []
    run = report.run
    rows = [["phase", "seconds", "basis"]]
    for phase in report.phases:
        rows.append([phase.phase, f"{phase.seconds:.2f}", "measured rates" if phase.measured else "estimate"])
    rows.append(["step", f"{report.step_seconds:.2f}", ""])
    lines = [f"Expected seconds of a step ({_lengths_text(run)}; without reward functions and data loading)"]
    lines += format_table(rows)
    if run.gpu is not None and run.gpu.name != MEASURED_GPU:
        lines.append(f"  Estimates are rates of one {MEASURED_GPU}, scaled by peak FLOP/s and bandwidth.")
    return lines


def _lengths_text(run: PlannedRun) -> str:
    data, lengths = run.config.data, run.lengths
    if not isinstance(run.config, PPOConfig):
        return f"rows of {(lengths.prompt or 0) + (lengths.response or 0) or data.max_length} tokens"
    prompt, response = lengths.prompt or data.max_prompt_length, lengths.response or data.max_response_length
    if not lengths.response:
        return f"if all prompts and responses have the maximum of {prompt} + {response} tokens: set --response-tokens"
    return f"{prompt} prompt and {response} response tokens on average"


def _checkpoint_text(report: PlanReport) -> list[str]:
    sizes = report.plan.checkpoint
    if not sizes:
        return []
    parts = ", ".join(f"{block or 'model'} {size / GB:.1f}" for block, size in sizes.items())
    total = sum(sizes.values())
    return [f"Checkpoint: {total / GB:.1f} GB ({parts}), written in about {total / _DISK:.0f} s at 1 GB/s."]
