"""A GRPO step: verl (`main_ppo` on Ray) compared with TRL, and with single features disabled.

    python benchmarks/training_step.py --engine-only --json FILE                    # the training engine by variant
    python benchmarks/training_step.py --systems ours trl --cases a b --json FILE   # complete steps and TRL
    python benchmarks/training_step.py --systems ours --features "everything off" --cases b --json FILE
    python benchmarks/training_step.py --summary --json FILE                        # targets, from all results in FILE

Models have random weights of a known shape; 32 prompts × 8 responses; (a) 128 + 256 tokens each, (b) 128 + ragged
lengths of mean 256 and max 2048. The length of every response is forced by one seeded schedule (`_training_work`).
Both sides have float32 master weights and compute in bf16, take one optimizer step, and use the same
activation checkpointing. MFU is the work that the rows require one by one (`Work.forward_flops`) relative to the matmul
rate measured here; `computed MFU` counts prompts that responses share once. Complete steps run in processes with a time
limit; every table is printed and written immediately.

Without a GPU everything is tiny: this only tests the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _ours_step import ENGINE_VARIANTS, run, run_limited, select_variants, variants
from _report import report
from _shapes import SHAPES, matmul_rate
from _training_work import Work

ENGINE = "verl engine"
# (system, variant, case, phase) of verl and of the comparison; minimum ratio of their times.
RATIOS = (
    ("step (a), times TRL's", ("verl", "all on", "a", "step"), ("trl", "float32", "a", "step"), 5.0),
    ("step (b), times TRL's", ("verl", "all on", "b", "step"), ("trl", "float32", "b", "step"), 12.0),
    ("step (a) with a reference", ("verl", "with reference", "a", "step"), ("trl", "float32, beta", "a", "step"), 3.5),
    ("step (b), everything on / off", ("verl", "all on", "b", "step"), ("verl", "everything off", "b", "step"), 2.5),
    (
        "update (b), remove padding",
        (ENGINE, "all on", "b", "update_actor"),
        (ENGINE, "no remove_padding", "b", "update_actor"),
        4.0,
    ),
    (
        "update (b), dynamic micro-batches",
        (ENGINE, "all on", "b", "update_actor"),
        (ENGINE, "no dynamic", "b", "update_actor"),
        1.2,
    ),
)
# (shape, measurement, column, limit): a minimum if positive, a maximum if negative.
LIMITS = (
    ("qwen2.5-0.5b", (ENGINE, "all on", "a", "update_actor"), "tokens/s", 110_000),
    ("qwen2.5-0.5b", (ENGINE, "all on", "a", "update_actor"), "peak GB", -20),
    ("qwen2.5-0.5b", (ENGINE, "checkpointing, 4 × the tokens", "a", "update_actor"), "tokens/s", 80_000),
    ("qwen2.5-0.5b", (ENGINE, "checkpointing, 4 × the tokens", "a", "update_actor"), "peak GB", -20),
    ("qwen2.5-1.5b", (ENGINE, "all on", "a", "update_actor"), "MFU", 0.45),
    ("qwen2.5-0.5b", ("verl", "all on", "a", "step"), "controller %", -3),
    ("qwen2.5-0.5b", ("verl", "all on", "b", "step"), "controller %", -3),
)


def work_of(case: str, shape: str, steps: int, small: bool) -> Work:
    prompts, n, prompt, mean, longest = (4, 4, 32, 16, 64) if small else (32, 8, 128, 256, 2048)
    return Work(case, shape, prompts, n, prompt, mean, mean if case == "a" else longest, steps)


def ours(options: argparse.Namespace, work: Work, folder: Path, rate: float) -> None:
    """Complete steps by `main_ppo` for each variant; only "all on" unless --features is set."""
    overrides_by_name = variants(work, options.budget, options.checkpointing, options.compile)
    for name, overrides in select_variants(overrides_by_name, options.features or ["all on"]).items():
        rows = run(work, folder, name, overrides, options.limit, rate)
        report(f"verl, {name}: {work.title()}", rows, options.json)


def engine_only(options: argparse.Namespace, work: Work, folder: Path, rate: float) -> None:
    """Update and log-prob pass by variant, in this process."""
    import _engine_step

    overrides_by_name = variants(work, options.budget, options.checkpointing, options.compile)
    features = options.features or list(ENGINE_VARIANTS)
    for name, overrides in select_variants(overrides_by_name, features).items():
        label = f"{name} ({options.budget // 1024}k)" if options.budget != default_budget() else name
        rows = _engine_step.measure_variant(work, folder, label, overrides, rate, options.repeats)
        report(f"engine, {label}: {work.title()}", rows, options.json)
    if options.profile:
        on = overrides_by_name["all on"]
        samples = max(1, min(work.samples, options.budget * work.samples // work.tokens(_engine_step.STEP)))
        title = f"an update of {samples} rows, all on: {work.title()}"
        report(title, _engine_step.profile(work, folder, on, samples), options.json)


def trl(options: argparse.Namespace, work: Work, folder: Path, rate: float) -> None:
    """TRL's GRPOTrainer on the same work; after an out-of-memory error a smaller micro-batch is tried."""
    micro = min(options.trl_micro or (32 if work.case == "a" else 8), work.samples)
    variant = options.trl_dtype + (", beta" if options.trl_beta else "")
    labels = {"system": "trl", "variant": variant, "case": work.case, "shape": work.shape}
    rows: list[dict[str, Any]] = []
    while micro and not rows:
        log = folder / f"trl-{work.case}.log"
        problem = run_limited(_trl_command(options, work, folder, micro), folder, _environment(), log, options.limit)
        text = log.read_text(errors="replace")
        steps = [json.loads(line.removeprefix("STEP ")) for line in text.splitlines() if line.startswith("STEP ")]
        if any(step["step"] > 0 for step in steps):
            rows = _trl_rows(work, [step for step in steps if step["step"] > 0], rate)
            rows[-1]["note"] = f"micro-batches of {micro}" + (f"; {problem}" if problem else "")
        elif problem and "OutOfMemoryError" in text and micro > 1:
            print(f"TRL: {micro} rows do not fit; trying {micro // 2}", flush=True)
            micro //= 2
        else:
            rows = [{"phase": "step", "note": problem or "no step was measured"}]
    report(f"TRL, {variant}: {work.title()}", [{**labels, **row} for row in rows], options.json)


def _environment() -> dict[str, str]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _trl_command(options: argparse.Namespace, work: Work, folder: Path, micro: int) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).parent / "_trl_step.py"),
        str(folder),
        work.case,
        f"--micro={micro}",
        f"--beta={options.trl_beta}",
        f"--dtype={options.trl_dtype}",
        f"--steps={options.trl_steps}",
        *(["--checkpointing"] if options.checkpointing else []),
    ]


def _trl_rows(work: Work, steps: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Means over steps: generation, rewards, the time between them and the update (the reference), the update."""
    count = len(steps)
    forward = sum(work.forward_flops(s["step"]) for s in steps) / count
    sampled = sum(int(work.lengths(s["step"]).sum()) for s in steps) / count
    tokens = sum(work.tokens(s["step"]) for s in steps) / count
    mean = {
        name: sum(s["seconds"].get(name, 0.0) for s in steps) / count
        for name in ("generate", "reward", "rollout", "step")
    }
    seconds = {
        "gen": mean["generate"],
        "reward": mean["reward"],
        "between": mean["rollout"] - mean["generate"] - mean["reward"],
        "update_actor": mean["step"] - mean["rollout"],
    }
    peak = max((value for s in steps for value in s["peak_gb"].values()), default=None)
    rows: list[dict[str, Any]] = [
        {"phase": name, "s": value, "tokens/s": (sampled if name == "gen" else tokens) / value}
        for name, value in seconds.items()
        if value > 0
    ]
    for row in rows:
        if row["phase"] == "update_actor":
            row["MFU"] = 3 * forward / row["s"] / rate
    return [*rows, {"phase": "step", "s": mean["step"], "tokens/s": tokens / mean["step"], "peak GB": peak}]


def summary(rows: list[dict[str, Any]], shape: str) -> list[dict[str, Any]]:
    """Targets and measurements; of repeated measurements the last one."""
    by_key = {(r["system"], r["variant"], r["case"], r["phase"]): r for r in rows if r["shape"] == shape and "s" in r}
    table: list[dict[str, Any]] = []
    for what, key, reference, minimum in RATIOS:
        if key in by_key and reference in by_key:
            ratio = by_key[reference]["s"] / by_key[key]["s"]
            table.append({"what": what, "found": ratio, "target": f"≥ {minimum}", "met": ratio >= minimum})
    for limit_shape, key, column, limit in LIMITS:
        value = by_key.get(key, {}).get(column)
        if shape == limit_shape and value is not None:
            _, variant, case, phase = key
            met = value >= limit if limit > 0 else value <= -limit
            target = f"{'≥' if limit > 0 else '≤'} {abs(limit)}"
            table.append(
                {"what": f"{phase} ({case}), {variant}: {column}", "found": value, "target": target, "met": met}
            )
    return table


def default_budget() -> int:
    return 8192 if torch.cuda.is_available() else 256


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["qwen2.5-0.5b" if cuda else "tiny"])
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--systems", nargs="+", choices=("ours", "trl"), default=["ours", "trl"])
    parser.add_argument("--features", nargs="+", default=[], help="variants whose name contains one of these")
    parser.add_argument("--engine-only", action="store_true", help="the training engine by variant, without Ray")
    parser.add_argument("--profile", action="store_true", help="with --engine-only: profile an update by kernel")
    parser.add_argument("--budget", type=int, default=default_budget(), help="tokens of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="checkpoint activations, in all systems")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave torch.compile out of 'all on'"
    )
    parser.add_argument("--repeats", type=int, default=2, help="measured passes of the engine, after a warm-up")
    parser.add_argument("--steps", type=int, default=3, help="steps of verl, the first of which is not counted")
    parser.add_argument("--trl-steps", type=int, default=2, help="steps of TRL; the first is a short warm-up")
    parser.add_argument("--trl-micro", type=int, help="per-device batch size of TRL; default 32 in (a), 8 in (b)")
    parser.add_argument(
        "--trl-dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of TRL's weights"
    )
    parser.add_argument("--trl-beta", type=float, default=0.0, help="KL coefficient; above 0: with a reference")
    parser.add_argument("--limit", type=float, default=240.0, help="maximum seconds of a run")
    parser.add_argument("--folder", type=Path, help="keeps models and logs; default: a temporary one")
    parser.add_argument("--summary", action="store_true", help="print only the targets, from --json")
    parser.add_argument("--json", help="append every table to this file")
    options = parser.parse_args()
    if not options.summary:
        with tempfile.TemporaryDirectory() as scratch:
            measure(options, options.folder or Path(scratch), small=not cuda)
    for shape in options.shapes:
        table = summary(_all_rows(options.json), shape) if options.json else []
        if table:
            report(f"targets, {shape}", table)


def measure(options: argparse.Namespace, folder: Path, small: bool) -> None:
    rate = matmul_rate("cpu" if small else "cuda")
    report("matrix product", [{"what": "measured rate", "TFLOP/s": rate / 1e12}], options.json)
    for shape in options.shapes:
        for case in options.cases:
            work = work_of(case, shape, options.steps, small)
            place = work.write((folder / shape).resolve())
            if options.engine_only:
                engine_only(options, work, place, rate)
                continue
            if "ours" in options.systems:
                ours(options, work, place, rate)
            if "trl" in options.systems:
                if _has_trl():
                    trl(options, work, place, rate)
                else:
                    print("TRL is not installed: skipped", flush=True)


def _has_trl() -> bool:
    import importlib.util

    return importlib.util.find_spec("trl") is not None


def _all_rows(path: str) -> list[dict[str, Any]]:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [row for line in lines for row in json.loads(line)["rows"] if "system" in row]


if __name__ == "__main__":
    main()
