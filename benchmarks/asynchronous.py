"""Asynchronous training: samples per second of `trainer.mode` sync, one_step_off and async on one device, by `main_ppo`
on Ray with the native engine, one after the other.

    python benchmarks/asynchronous.py --json FILE                        # 0.5B, case (b) of training_step.py
    python benchmarks/asynchronous.py --profile --modes async --json FILE   # what the device does during an update
    python benchmarks/asynchronous.py --shape qwen2.5-7b --modes sync --json FILE    # 64 samples of up to 4,096 tokens
    python benchmarks/asynchronous.py --shape qwen2.5-7b --modes async --json FILE
    python benchmarks/asynchronous.py --learn MODEL DATA --seeds 1 --json FILE   # SmolLM2: accuracy by wall-clock time
    python benchmarks/asynchronous.py --cases equal gsm8k ragged --shape qwen2.5-1.5b --model MODEL --data DATA \
        --within 540 --resume --json FILE                                # interleaved; repeat until all runs are done
    python benchmarks/asynchronous.py --summary --json FILE              # all results of FILE relative to sync

Work and lengths are those of `_training_work`: responses have the same lengths in every mode. The measurement covers
the middle of a run: it begins after compilation and capture of CUDA graphs, when the queue is full, and ends while
prompts are still submitted.

`--cases` alternates the modes, with --measured steps per run and --rounds runs per mode, and compares median seconds
per step: `equal` and `ragged` are (a) and (b) of training_step.py; `gsm8k` is GRPO of a real model on GSM8K, 64 prompts
× 8 responses of up to 1,024 tokens that end by themselves (MODEL: the folder of examples/models/smollm2.py; DATA: that
of examples/data_preprocess/gsm8k.py). `ragged` has max_staleness=3 in asynchronous modes, the others 1. All take one
optimizer step per training step. A run takes its start-up (30 to 60 s on an H200 with warm caches, in $VERL_CACHE) and
--warm + --measured steps. Every run is written to FILE when it ends; --resume skips the runs in FILE.

`--learn` runs examples/smollm2 and needs its model and data folders (see its README). Without a GPU everything is tiny:
this only tests the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _async_runs import (
    CASES,
    HERE,
    MODES,
    breakdown,
    environment_of_runs,
    interleave,
    medians,
    records_of,
    rows_of,
    run_name,
)
from _ours_step import ACTOR, ROLLOUT, base, command, run_limited
from _report import report
from _training_work import Work

# Required for a 7B model on one device, in every mode.
_LARGE = [
    f"{ACTOR}.optim.state_dtype=bf16",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    f"{ROLLOUT}.gpu_memory_utilization=0.15",
    f"{ROLLOUT}.max_num_seqs=128",
]
_ACCURACY = "val/two_step/accuracy"


def work_of(shape: str, steps: int) -> Work:
    """Case (b), or 8 prompts × 8 responses with sequences of up to 4,096 tokens for a 7B model; tiny without a GPU."""
    if shape == "tiny":
        return Work("b", shape, prompts=4, n=4, prompt_length=32, mean=16, longest=64, steps=steps)
    if shape == "qwen2.5-7b":
        return Work("b", shape, prompts=8, n=8, prompt_length=1024, mean=1024, longest=3072, steps=steps)
    return Work("b", shape, prompts=32, n=8, prompt_length=128, mean=256, longest=2048, steps=steps)


def window(steps: int, warm: int, ahead: int) -> tuple[int, int]:
    """The steps (from 0) whose ends delimit the measurement."""
    first, last = min(warm, steps - 2) - 1, steps - 1 - ahead
    return max(0, first), max(first + 1, last, 1)


def summarize_run(records: Sequence[Mapping[str, Any]], samples: int, warm: int, ahead: int) -> dict[str, Any]:
    """The table row of a run; `records` have `time` and `data` of every step."""
    first, last = window(len(records), warm, ahead)
    inside = [record["data"] for record in records[first + 1 : last + 1]]
    seconds = records[last]["time"] - records[first]["time"]
    row: dict[str, Any] = {
        "samples/s": samples * len(inside) / seconds,
        "samples/min": 60 * samples * len(inside) / seconds,
        "s/step": seconds / len(inside),
    }
    return row | breakdown(inside) | {"steps": len(inside)}


def run_mode(options: argparse.Namespace, work: Work, folder: Path, mode: str) -> dict[str, Any]:
    """Run one mode in a process with a time limit; return its row."""
    name = run_name(mode)
    profile = folder / f"{name}-profile.json"
    overrides = [*base(work, options.budget, options.checkpointing, options.compile), *MODES[mode], *options.more]
    overrides += _LARGE if work.shape == "qwen2.5-7b" else []
    environment = environment_of_runs()
    if options.profile:
        environment |= {"OVERLAP_PROFILE": str(profile), "OVERLAP_UPDATE": str(min(options.warm + 2, work.steps - 1))}
    metrics = folder / "runs" / "training_step" / name / "metrics.jsonl"
    for old in (metrics, profile):
        old.unlink(missing_ok=True)
    problem = run_limited(
        command(work, folder, name, overrides), folder, environment, folder / f"{name}.log", options.limit
    )
    records = records_of(metrics, "timing_s/step")
    head = {"mode": mode, "shape": work.shape}
    if len(records) < 3:
        return head | {"note": problem or "fewer than three steps"}
    if profile.exists():
        _show_profile(mode, json.loads(profile.read_text()), options.json)
    return (
        head
        | summarize_run(records, work.samples, options.warm, options.ahead)
        | ({"note": problem} if problem else {})
    )


def learn(options: argparse.Namespace, folder: Path, mode: str, seed: int) -> dict[str, Any]:
    """Run examples/smollm2 in one mode; seconds until each accuracy, counted from before the first step."""
    model, data = (Path(path).resolve() for path in options.learn)
    name = f"{run_name(mode)}-{seed}"
    overrides = [
        *MODES[mode],
        f"data.seed={seed}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.test_freq=5",
        "trainer.val_before_train=True",
        "trainer.logger=[file]",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder / name}",
        f"trainer.validation_data_dir={folder / name / 'answers'}",
        "trainer.resume_mode=disable",
        "trainer.used_dir=move_aside",
        *options.more,
    ]
    environment = environment_of_runs() | {"MODEL": str(model), "DATA": str(data)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    script = ["bash", str(HERE.parent / "examples" / "smollm2" / "run.sh"), *overrides]
    metrics = folder / "runs" / "smollm2" / name / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    problem = run_limited(script, folder, environment, folder / f"{name}.log", options.limit)
    head = {"mode": mode, "seed": seed}
    row = time_to_accuracy(records_of(metrics, _ACCURACY))
    return head | (row or {"note": "no validation was logged"}) | ({"note": problem} if problem else {})


def time_to_accuracy(records: Sequence[Mapping[str, Any]], goals: Sequence[float] = (0.5, 0.8)) -> dict[str, Any]:
    """Seconds from the first validation to each goal (None: never); accuracy, step and seconds at the end."""
    if len(records) < 2:
        return {}
    start, last = records[0]["time"], records[-1]
    row: dict[str, Any] = {}
    for goal in goals:
        hit = next((record for record in records if float(record["data"][_ACCURACY]) >= goal), None)
        row[f"s to {goal:.0%}"] = None if hit is None else hit["time"] - start
    return row | {"accuracy": float(last["data"][_ACCURACY]), "steps": last["step"], "s": last["time"] - start}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every mode relative to sync of the same shape; of repeated measurements the last one."""
    latest = {(row["shape"], row["mode"]): row for row in rows if "samples/s" in row and "shape" in row}
    table = []
    for (shape, mode), row in latest.items():
        sync = latest.get((shape, "sync"))
        times = row["samples/s"] / sync["samples/s"] if sync else None
        table.append({"shape": shape, "mode": mode, "samples/s": row["samples/s"], "times sync": times})
    return table


def _show_profile(mode: str, profile: Mapping[str, Any], path: str | None) -> None:
    """Shares of an update's time: any stream busy, several at once, and each stream with its costliest kernel."""
    wall = profile["wall s"]
    rows: list[dict[str, Any]] = [
        {"activity": "update", "s": wall, "share": 1.0},
        {"activity": "device busy", "s": profile["busy s"], "share": profile["busy s"] / wall},
        {
            "activity": "several streams at once",
            "s": profile["several at once s"],
            "share": profile["several at once s"] / wall,
        },
    ]
    for stream in profile["streams"][:6]:
        costliest = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stream["kernels"][:3])
        row = {"activity": f"stream {stream['stream']}", "s": stream["s"], "share": stream["s"] / wall}
        rows.append({**row, "events": stream["events"], "costliest": costliest})
    report(f"{mode}: the device during one update", rows, path)


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--shape",
        choices=("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "tiny"),
        default="qwen2.5-0.5b" if cuda else "tiny",
    )
    add("--modes", nargs="+", choices=list(MODES), help="default: sync one_step_off async; with --cases: sync async")
    add("--steps", type=int, help="steps of a run; default 14 (7B: 5; --learn: 60; without a GPU: 5)")
    add("--warm", type=int, default=4, help="steps that are not counted at the beginning")
    add("--ahead", type=int, default=2, help="steps that are not counted at the end")
    add("--budget", type=int, default=8192 if cuda else 256, help="tokens of a micro-batch")
    add("--checkpointing", action="store_true", help="checkpoint activations (always with 7B)")
    add("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    add("--profile", action="store_true", help="also profile the device during one update")
    add("--learn", nargs=2, metavar=("MODEL", "DATA"), help="accuracy by time, with these folders of examples/smollm2")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of --learn")
    add("--cases", nargs="+", choices=list(CASES), default=[], help="interleaved runs of these comparisons")
    add("--rounds", type=int, default=2, help="--cases: runs of every mode")
    add(
        "--measured",
        type=int,
        default=16 if cuda else 2,
        help="--cases: measured steps of a run (even: async may alternate)",
    )
    add("--model", help="--cases gsm8k: folder of the model")
    add("--data", help="--cases gsm8k: folder with train.parquet")
    add("--within", type=float, help="--cases: start no run that would probably end after this many seconds")
    add("--resume", action="store_true", help="--cases: skip runs that --json already contains")
    add("--limit", type=float, default=280.0, help="maximum seconds of a run")
    add("--folder", type=Path, help="keeps models and logs; default: a temporary one")
    add("--more", nargs="+", default=[], help="overrides for every run: trainer.max_staleness=2 …")
    add("--summary", action="store_true", help="print only the comparison, from --json")
    add("--json", help="append every table to this file")
    return parser


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    _complete(parser, options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not options.summary:
            _measure(options, folder)
    rows = rows_of(options.json)
    if table := summary([row for row in rows if "round" not in row]):
        report("samples per second relative to sync", table)
    if table := medians(rows):
        report("median seconds per step of interleaved runs", table)


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other options."""
    large = options.shape == "qwen2.5-7b"
    options.checkpointing = options.checkpointing or large
    options.modes = options.modes or (["sync", "async"] if options.cases else ["sync", "one_step_off", "async"])
    if options.cases:
        if large:
            parser.error("--cases does not support --shape qwen2.5-7b. Run this shape without --cases.")
        if options.resume and not options.json:
            parser.error("--resume: set --json, which contains the finished runs")
        if "gsm8k" in options.cases and not (options.model and options.data):
            parser.error("--cases gsm8k: set --model and --data")
        options.warm = min(options.warm, max(1, options.measured))
        return
    if options.steps is None:
        options.steps = 60 if options.learn else 5 if large or options.shape == "tiny" else 14
    # Asynchronous modes first compute old log-probs in the second step, which compiles this pass.
    options.warm, options.ahead = min(options.warm, max(2, options.steps // 3)), min(options.ahead, options.steps // 5)


def _measure(options: argparse.Namespace, folder: Path) -> None:
    if options.cases:
        interleave(options, folder)
    elif options.learn:
        for seed in options.seeds:
            for mode in options.modes:
                report(f"{mode}, seed {seed}", [learn(options, folder, mode, seed)], options.json)
    else:
        work = work_of(options.shape, options.steps)
        work_folder = work.write(folder / options.shape)
        for mode in options.modes:
            report(f"{mode}: {work.title()}", [run_mode(options, work, work_folder, mode)], options.json)


if __name__ == "__main__":
    main()
