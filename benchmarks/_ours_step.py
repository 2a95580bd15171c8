"""Training steps of verl by `main_ppo` on Ray with the native engine, and the configurations that are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _training_work import Work
from _worker_profile import covered

from verl.utils.process_tree import kill_tree

# Phases in order; cost of each in forward passes.
PHASES = {
    "update_weights": 0,
    "gen": 0,
    "reward": 0,
    "old_log_prob": 1,
    "ref": 1,
    "adv": 0,
    "update_actor": 3,
}


def command(work: Work, folder: Path, name: str, overrides: list[str]) -> list[str]:
    """The command line of a run: one optimizer step per training step, without checkpoints and validation."""
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / f'{work.case}.parquet'}",
        f"data.train_batch_size={work.prompts}",
        "data.shuffle=False",
        f"data.max_prompt_length={work.prompt_length}",
        f"data.max_response_length={work.longest}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.n={work.n}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.total_training_steps={work.steps}",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={'cuda' if torch.cuda.is_available() else 'cpu'}",
        "trainer.logger=[file]",
        "trainer.project_name=training_step",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder / name}",
        "trainer.resume_mode=disable",
        "trainer.used_dir=move_aside",
        "trainer.save_freq=-1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[extra]",
        "external_libs=[_worker_profile]",
        *overrides,
    ]


def run(
    work: Work, folder: Path, variant: str, overrides: list[str], limit: float, rate: float
) -> list[dict[str, Any]]:
    """Run for up to `limit` seconds; return a row per phase and one for the whole step.

    Values are means over all finished steps but the first.
    """
    name = f"{work.case}-{variant}".replace(",", "").replace(" ", "-")  # a comma would separate values of a list
    clock, log = folder / f"{name}.clock", folder / f"{name}.log"
    metrics = folder / "runs" / "training_step" / name / "metrics.jsonl"
    for old in (clock, metrics):
        old.unlink(missing_ok=True)
    benchmarks = Path(__file__).parent
    environment = {
        "RAY_ADDRESS": "local",
        **os.environ,
        "WORKER_CLOCK": str(clock),
        "PYTHONPATH": os.pathsep.join([str(benchmarks.parent), str(benchmarks), os.environ.get("PYTHONPATH", "")]),
    }
    start = time.monotonic()
    problem = run_limited(command(work, folder, name, overrides), folder, environment, log, limit)
    steps = training_steps(metrics)
    labels = {"system": "verl", "variant": variant, "case": work.case, "shape": work.shape}
    if len(steps) < 2:
        return [{**labels, "phase": "step", "note": problem or "fewer than two steps"}]
    rows = _phase_rows(work, steps, _busy(clock, whole=False), _busy(clock, whole=True), rate)
    note = problem or f"{len(steps)} steps, {time.monotonic() - start:.0f} s with start-up"
    return [{**labels, **row} for row in rows[:-1]] + [{**labels, **rows[-1], "note": note}]


def run_limited(command: list[str], folder: Path, environment: dict[str, str], log: Path, limit: float) -> str | None:
    """Run a command, its output in `log`; return the problem or None. After `limit` seconds, kill its process tree."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"cut off after {limit:.0f} s"
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
    if code:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
        return f"failed with code {code} (see above)"
    return None


def training_steps(metrics: Path) -> list[dict[str, float]]:
    """Metrics of the training steps in a file of the file tracker; [] if it does not exist."""
    if not metrics.exists():
        return []
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return [row for row in rows if "timing_s/step" in row]


def _busy(clock: Path, whole: bool) -> list[float]:
    """Seconds of each step in which any rank was busy; a rank's step ends with its actor update.

    A rank generates from the call of `begin_generation` until that of `end_generation` returns.
    """
    steps: dict[int, list[tuple[float, float]]] = {}
    of_rank: dict[int, int] = {}
    generating: dict[int, float] = {}
    for call in map(json.loads, clock.read_text().splitlines() if clock.exists() else []):
        if call["whole"] is not whole:
            continue
        step = of_rank.setdefault(call["rank"], 0)
        begin = call["begin"]
        if call["method"] == "begin_generation":
            generating[call["rank"]] = begin
        elif call["method"] == "end_generation":
            begin = generating.pop(call["rank"], begin)
        if call["method"] not in ("init_model", "save_checkpoint"):
            steps.setdefault(step, []).append((begin, call["end"]))
        of_rank[call["rank"]] += call["method"] == "update_actor"
    return [covered(spans) for step, spans in sorted(steps.items()) if step < min(of_rank.values())]


def _phase_rows(
    work: Work, steps: list[dict[str, float]], method_seconds: list[float], call_seconds: list[float], rate: float
) -> list[dict[str, Any]]:
    """One row per phase, and one for the step with idle time and the controller's share.

    `method_seconds`, `call_seconds`: `_busy` seconds of each step, without and with transfer of inputs and results.
    """
    measured = range(1, len(steps))
    count = len(measured)
    forward = sum(work.forward_flops(step) for step in measured) / count
    tokens = sum(work.tokens(step) for step in measured) / count
    sampled = sum(int(work.lengths(step).sum()) for step in measured) / count

    def mean(key: str) -> float:
        return sum(steps[step].get(key, 0.0) for step in measured) / count

    shares = mean("actor/prefix_saving") > 0
    computed = sum(work.forward_flops(step, shares) for step in measured) / count
    rows: list[dict[str, Any]] = []
    for phase, passes in PHASES.items():
        seconds = mean(f"timing_s/{phase}")
        if not seconds:
            continue
        processed = sampled if phase == "gen" else tokens
        rows.append({"phase": phase, "s": seconds, "tokens/s": processed / seconds, "MFU": None})
        if passes:
            rows[-1] |= {
                "MFU": passes * forward / seconds / rate,
                "computed MFU": passes * computed / seconds / rate,
            }
        rows[-1]["peak GB"] = max(steps[step].get(f"memory_gb/{phase}", 0.0) for step in measured) or None
    whole, reward = mean("timing_s/step"), mean("timing_s/reward")
    peak = max(
        (value for step in measured for key, value in steps[step].items() if key.startswith("memory_gb/")), default=0.0
    )
    row: dict[str, Any] = {"phase": "step", "s": whole, "tokens/s": tokens / whole, "peak GB": peak or None}
    if len(call_seconds) >= len(steps):
        row["idle s"] = whole - sum(method_seconds[step] for step in measured) / count
        left = whole - reward - sum(call_seconds[step] for step in measured) / count
        row["controller %"] = 100 * max(0.0, left) / whole
    rows.append(row)
    return rows


MODEL, ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))


def base(work: Work, budget: int, checkpointing: bool, compiled: bool) -> list[str]:
    """All features enabled, micro-batches of `budget` tokens, four times as many tokens in passes without gradients."""
    return [
        f"{MODEL}.use_remove_padding=True",
        f"{MODEL}.enable_gradient_checkpointing={checkpointing}",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu={max(budget, work.sequence)}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={4 * max(budget, work.sequence)}",
        f"{REF}.log_prob_max_token_len_per_gpu={4 * max(budget, work.sequence)}",
        f"{ACTOR}.use_torch_compile={compiled}",
        f"{ACTOR}.old_log_prob_from_update=True",
    ]


def fixed_rows(work: Work, budget: int) -> list[str]:
    """Micro-batches with a fixed number of rows, which never exceed the budget even at the maximum length."""
    rows = max(1, budget // work.sequence)
    return [
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={min(rows, work.samples)}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={min(4 * rows, work.samples)}",
        f"{REF}.log_prob_micro_batch_size_per_gpu={min(4 * rows, work.samples)}",
    ]


def variants(work: Work, budget: int, checkpointing: bool, compiled: bool) -> dict[str, list[str]]:
    """Overrides by variant name. Without remove_padding, micro-batches have fixed rows: the budget ignores padding."""
    on = base(work, budget, checkpointing, compiled)
    fixed = fixed_rows(work, budget)
    padded = [*fixed, f"{MODEL}.use_remove_padding=False"]
    separate = [f"{ACTOR}.old_log_prob_from_update=False"]
    unshared = [f"{ACTOR}.use_prefix_grouper=False"]
    plain = [*padded, *separate, *unshared, f"{ACTOR}.use_torch_compile=False", "reward_model.overlap=False"]
    return {
        "all on": on,
        "no dynamic": [*on, *fixed],
        "no remove_padding": [*on, *padded],
        f"{'no' if checkpointing else 'with'} checkpointing": [
            *on,
            f"{MODEL}.enable_gradient_checkpointing={not checkpointing}",
        ],
        "checkpointing, 4 × the tokens": [
            *on,
            f"{MODEL}.enable_gradient_checkpointing=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu={4 * max(budget, work.sequence)}",
        ],
        f"{'no' if compiled else 'with'} compile": [*on, f"{ACTOR}.use_torch_compile={not compiled}"],
        "no shared prefixes": [*on, *unshared],
        "separate old log-probs": [*on, *separate],
        "rewards afterwards": [*on, "reward_model.overlap=False"],
        "keep the KV cache": [*on, f"{ROLLOUT}.free_cache_engine=False"],
        "with reference": [*on, f"{ACTOR}.use_kl_loss=True"],
        "everything off": [*on, *plain],
    }


# Variants that change the training engine (`--engine-only`); parts of the names above.
ENGINE_VARIANTS = (
    "all on",
    "no dynamic",
    "no remove_padding",
    "checkpointing",
    "compile",
    "shared prefixes",
    "separate old",
    "everything off",
)


def select_variants(overrides_by_name: dict[str, list[str]], features: list[str]) -> dict[str, list[str]]:
    """Variants whose name contains one of `features`; all if `features` is empty."""
    if not features:
        return overrides_by_name
    patterns = [feature.replace("_", " ") for feature in features]
    selected = {
        name: overrides
        for name, overrides in overrides_by_name.items()
        if any(pattern in name.replace("_", " ") for pattern in patterns)
    }
    if not selected:
        raise SystemExit(f"--features {' '.join(features)}: no such variant. Known: {', '.join(overrides_by_name)}.")
    return selected
