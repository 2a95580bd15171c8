"""Interleaved runs of `asynchronous.py`: sync and async take turns, and the seconds of their steps are pooled."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _ours_step import ACTOR, base, command, run_limited
from _report import report
from _training_work import Work

HERE = Path(__file__).parent
MODES: dict[str, list[str]] = {
    "sync": ["trainer.mode=sync"],
    "one_step_off": ["trainer.mode=one_step_off"],
    "async": ["trainer.mode=async"],
    "async, no weights": ["trainer.mode=async", "algorithm.rollout_correction.rollout_is=null"],
    "async, kept KV": ["trainer.mode=async", "trainer.partial_kv=keep"],
    # The log-probs of the rollout are used as old log-probs: the trainer does not recompute them.
    "async, bypass": [
        "trainer.mode=async",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{ACTOR}.old_log_prob_from_update=False",
    ],
}
# Columns and their metrics, averaged over steps.
BREAKDOWN = {
    "wait s": "timing_s/gen",
    "weight sync s": "timing_s/update_weights",
    "old log-probs s": "timing_s/old_log_prob",
    "update s": "timing_s/update_actor",
    "trainer idle": "trainer/idle_ratio",
    "rollout idle": "rollouter/idle_ratio",
    "partial": "fully_async/partial/partial_ratio",
}


@dataclass(frozen=True)
class Case:
    """One comparison; `goal`: minimum speed of async relative to sync."""

    goal: float
    staleness: int = 1
    """`trainer.max_staleness` of the asynchronous modes."""


CASES = {"equal": Case(0.97), "gsm8k": Case(1.0), "ragged": Case(1.75, staleness=3)}


def breakdown(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Means of the columns of BREAKDOWN that these steps have, and their peak memory."""
    row: dict[str, Any] = {
        title: statistics.fmean(float(step.get(key, 0.0)) for step in steps)
        for title, key in BREAKDOWN.items()
        if any(key in step for step in steps)
    }
    peaks = [value for step in steps for key, value in step.items() if key.startswith("memory_gb/")]
    return row | {"peak GB": max(peaks, default=None)}


def records_of(metrics: Path, key: str) -> list[dict[str, Any]]:
    """Records of a metrics file that contain `key`."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [record for record in map(json.loads, lines) if key in record["data"]]


def rows_of(path: str | None) -> list[dict[str, Any]]:
    """All rows of the tables in a file of results; [] if it does not exist."""
    lines = Path(path).read_text().splitlines() if path and Path(path).exists() else []
    return [row for line in lines for row in json.loads(line)["rows"]]


def run_name(mode: str) -> str:
    return mode.replace(",", "").replace(" ", "-")


def environment_of_runs() -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {"RAY_ADDRESS": "local", **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "WORKER_CLOCK": os.devnull}


# ---------------------------------------------------------------- interleaved runs


def interleave(options: Namespace, folder: Path) -> None:
    """Run all rounds, cases and modes; with --resume only those that are not in --json.

    Every second round runs the modes in reverse order.
    """
    began, longest = time.monotonic(), 0.0
    finished = {_run_key(row) for row in rows_of(options.json)} if options.resume else set()
    for number in range(options.rounds):
        for case in options.cases:
            for mode in options.modes[:: -1 if number % 2 else 1]:
                work = _work(options, case, mode)
                labels = {"case": case, "shape": work.shape, "mode": mode, "round": number}
                if _run_key(labels | {"step s": [], "more": options.more}) in finished:
                    continue
                run_began = time.monotonic()
                if options.within and run_began - began + longest > options.within:
                    print(f"--within {options.within:.0f}: the remaining runs are left to --resume", flush=True)
                    return
                row = labels | _run(options, case, work, folder / work.shape, mode)
                report(f"{case}, round {number}, {mode}: {work.title()}", [row], options.json)
                longest = max(longest, time.monotonic() - run_began)


def step_rows(records: Sequence[Mapping[str, Any]], samples: int, warm: int, measured: int) -> dict[str, Any]:
    """The columns of a run: `measured` steps after `warm` ones; a step lasts from the end of the previous one."""
    ends = [float(record["time"]) for record in records[warm - 1 : warm + measured]]
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    steps = [record["data"] for record in records[warm : warm + measured]]
    if len(steps) < measured:
        return {"note": f"{len(records)} of at least {warm + measured} steps ended"}
    tokens = samples * sum(float(step["response_length/mean"]) for step in steps)
    row = {"steps": measured, "median s": statistics.median(seconds), "mean s": statistics.fmean(seconds)}
    row |= {"samples/s": samples * measured / sum(seconds), "tokens/s": tokens / sum(seconds)}
    return row | breakdown(steps) | {"step s": [round(value, 4) for value in seconds]}


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per case, shape, mode and --more over the steps of all rounds; a repeated round replaces earlier ones.

    The reference is sync with the same --more, or else without it. Steps of async may alternate between short ones,
    whose batch was already generated, and long ones: the ratio of means (`mean × sync`) is then more robust than the
    ratio of medians.
    """
    latest = {_run_key(row): row for row in rows if _run_key(row)}
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for (case, shape, mode, _, more), row in latest.items():
        groups.setdefault((case, shape, mode, more), []).append(row)
    table = []
    for case, shape, mode, more in sorted(groups, key=lambda key: (*key[:2], key[2] != "sync", *key[2:])):
        runs = groups[case, shape, mode, more]
        line = {"case": case, "shape": shape, "mode": mode} | _pooled(runs)
        if sync := groups.get((case, shape, "sync", more)) or groups.get((case, shape, "sync", ())):
            reference, goal = _pooled(sync), CASES[case].goal
            times = reference["median s"] / line["median s"]
            line |= {"× sync": times, "mean × sync": reference["mean s"] / line["mean s"]}
            line |= {"tokens/s × sync": line["tokens/s"] / reference["tokens/s"]}
            if mode.startswith("async"):
                line |= {"goal": f"≥ {goal}", "met": times >= goal}
        for name in (*BREAKDOWN, "start s"):
            if values := [run[name] for run in runs if name in run]:
                line[name] = statistics.fmean(values)
        peaks = [run["peak GB"] for run in runs if run.get("peak GB")]
        table.append(line | {"peak GB": max(peaks, default=None), "more": " ".join(more) or None})
    return table


def _pooled(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Step times over all steps of these runs; samples and tokens per second over their whole time."""
    seconds = [value for run in runs for value in run["step s"]]
    row = {"rounds": len(runs), "steps": len(seconds), "median s": statistics.median(seconds)}
    row |= {"mean s": statistics.fmean(seconds), "max s": max(seconds)}
    for name in ("samples/s", "tokens/s"):
        row[name] = sum(run[name] * sum(run["step s"]) for run in runs) / sum(seconds)
    return row


def _run_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identify a complete interleaved run; () for other rows."""
    if "round" not in row or "step s" not in row:
        return ()
    return (*(row[name] for name in ("case", "shape", "mode", "round")), tuple(row.get("more") or ()))


def _work(options: Namespace, case: str, mode: str) -> Work:
    """The work of a case. Asynchronous runs have extra steps: they submit prompts until the measurement ends."""
    small, staleness = options.shape == "tiny", CASES[case].staleness
    steps = options.warm + options.measured + (0 if mode == "sync" else staleness + 1)
    if case == "gsm8k":
        prompts, n, prompt, longest = (2, 4, 320, 32) if small else (64, 8, 512, 1024)
        return Work(case, Path(options.model).resolve().name, prompts, n, prompt, longest, longest, steps)
    prompts, n, prompt, mean, longest = (4, 4, 32, 16, 64) if small else (32, 8, 128, 256, 2048)
    label, longest = ("a", mean) if case == "equal" else ("b", longest)
    return Work(label, options.shape, prompts, n, prompt, mean, longest, steps)


def _run(options: Namespace, case: str, work: Work, folder: Path, mode: str) -> dict[str, Any]:
    """Run a mode on this work in a process with a time limit; return its columns."""
    folder.mkdir(parents=True, exist_ok=True)
    budget = options.budget * (4 if case == "gsm8k" else 1)  # the model of gsm8k is small
    overrides = [*base(work, budget, options.checkpointing, options.compile), *MODES[mode]]
    if case == "gsm8k":
        overrides += _gsm8k(options)
    else:
        work.write(folder)
    if mode.startswith("async"):
        overrides.append(f"trainer.max_staleness={CASES[case].staleness}")
    name = f"{work.case}-{run_name(mode)}"
    metrics = folder / "runs" / "training_step" / name / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    began, clock = time.time(), time.monotonic()
    full_command = command(work, folder, name, [*overrides, *options.more])
    problem = run_limited(full_command, folder, environment_of_runs(), folder / f"{name}.log", options.limit)
    records = records_of(metrics, "timing_s/step")
    row = step_rows(records, work.samples, options.warm, options.measured)
    if records:
        row["start s"] = float(records[0]["time"]) - began
    row |= {"run s": time.monotonic() - clock} | ({"more": options.more} if options.more else {})
    notes = [note for note in (row.get("note"), problem) if note]
    return row | ({"note": "; ".join(notes)} if notes else {})


def _gsm8k(options: Namespace) -> list[str]:
    """Overrides that replace the random model and forced lengths: GSM8K with its rule; responses end by themselves."""
    return [
        f"data.train_files={Path(options.data).resolve() / 'train.parquet'}",
        f"actor_rollout_ref.model.path={Path(options.model).resolve()}",
        "actor_rollout_ref.rollout.ignore_eos=False",
        f"{ACTOR}.optim.lr=1e-6",
        "custom_reward_function.path=null",
    ]
