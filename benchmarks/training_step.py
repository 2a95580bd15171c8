"""A GRPO step: verl (`main_ppo` on Ray) compared with TRL, with TRL and vLLM, and with single features disabled.

    python benchmarks/training_step.py --engine-only --json FILE                    # the training engine by variant
    python benchmarks/training_step.py --systems ours trl-vllm --repetitions 3 --resume --json FILE   # complete steps
    python benchmarks/training_step.py --systems ours trl-vllm --lora-rank 32 --shapes qwen2.5-7b --json FILE
    python benchmarks/training_step.py --systems ours --features "everything off" --cases b --json FILE
    python benchmarks/training_step.py --summary --json FILE                        # tables, from all results in FILE

Models have random weights of a known shape; 32 prompts × 8 responses; (a) 128 + 256 tokens each, (b) 128 + ragged
lengths of mean 256 and max 2048. The length of every response is forced by one seeded schedule (`_training_work`).
All systems take one optimizer step per training step. verl: float32 master weights and AdamW moments, compute in bf16,
rollout in bf16. `trl`: TRL with transformers' generation, weights of --trl-dtype (float32), bf16 autocast, and the same
activation checkpointing. `trl-vllm`: TRL with a colocated vLLM (bf16, 0.3 of the memory) and otherwise TRL's defaults,
which checkpoint activations. The note of each row states the actual dtypes of weights and moments. With
--lora-rank all systems train adapters of all linear layers on frozen weights (verl: bf16; TRL: --trl-dtype).

MFU is the work of the rows without sharing (`Work.forward_flops`) relative to the matmul rate measured here; `computed
MFU` counts a prompt that several responses share once. Complete steps run in processes with a time limit; every table
is printed and written immediately. With --repetitions the systems alternate, and the last table has medians; --resume
skips runs that are in FILE. A 7B model is trained with checkpointed activations.

Without a GPU everything is tiny: this only tests the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ours_step import ENGINE_VARIANTS, MODEL, run, select_variants, variants
from _report import report
from _shapes import SHAPES, matmul_rate
from _training_work import Work
from _trl_runs import has_trl, measure_trl, trl_variant

ENGINE = "verl engine"
PRECISION = "weights float32, moments float32"
"""Dtypes of trained weights and their moments in verl by default (`fsdp_config`, `optim.state_dtype`)."""
SYSTEMS = ("ours", "trl", "trl-vllm")
CHECKPOINTED = ("qwen2.5-7b",)
"""Shapes whose activations do not fit without checkpointing."""
# (label, rows of verl, rows of the comparison, minimum ratio of their times); rows as (system, variant, case, phase).
RATIOS = (
    ("step (a), speed-up over TRL", ("verl", "all on", "a", "step"), ("trl", "float32", "a", "step"), 5.0),
    (
        "step (a), speed-up over TRL with vLLM",
        ("verl", "all on", "a", "step"),
        ("trl-vllm", "float32", "a", "step"),
        3.2,
    ),
    (
        "step (b), speed-up over TRL with vLLM",
        ("verl", "all on", "b", "step"),
        ("trl-vllm", "float32", "b", "step"),
        1.0,
    ),
    ("step (b), speed-up over TRL", ("verl", "all on", "b", "step"), ("trl", "float32", "b", "step"), 12.0),
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
    ("qwen2.5-1.5b", ("verl", "all on", "a", "step"), "s", -2.6),
    ("qwen2.5-0.5b", ("verl", "all on", "a", "step"), "controller %", -3),
    ("qwen2.5-0.5b", ("verl", "all on", "b", "step"), "controller %", -3),
)


def work_of(case: str, shape: str, steps: int, small: bool) -> Work:
    prompts, n, prompt, mean, longest = (4, 4, 32, 16, 64) if small else (32, 8, 128, 256, 2048)
    return Work(case, shape, prompts, n, prompt, mean, mean if case == "a" else longest, steps)


def complete_steps(options: argparse.Namespace, work: Work, folder: Path, rate: float, repetition: int) -> None:
    """Complete steps of every system. verl: all variants of --features, only "all on" without it."""
    checkpointing = options.checkpointing or work.shape in CHECKPOINTED
    overrides_by_name = variants(work, options.budget, checkpointing, options.compile)
    lora = [f"{MODEL}.lora_rank={options.lora_rank}"] if options.lora_rank else []
    selected = select_variants(overrides_by_name, options.features or ["all on"])
    runs: list[tuple[str, str, Callable[[], list[dict[str, Any]]]]] = []
    if "ours" in options.systems:
        for name, overrides in selected.items():
            variant = name + (f", LoRA {options.lora_rank}" if lora else "")
            runs.append(
                ("verl", variant, partial(run, work, folder, variant, [*overrides, *lora], options.limit, rate))
            )
    for system in ("trl", "trl-vllm"):
        if system in options.systems:
            vllm = system == "trl-vllm"
            if has_trl(vllm):
                runs.append((system, trl_variant(options), partial(measure_trl, options, work, folder, rate, vllm)))
            else:
                print(f"{system}: TRL{' or vLLM' if vllm else ''} is not installed: skipped", flush=True)
    rows_in_file = _all_rows(options.json) if options.resume and options.json else []
    measured = {_run_key(row) for row in rows_in_file if row.get("phase") == "step" and "s" in row}
    for system, variant, measure_run in runs[:: -1 if repetition % 2 else 1]:
        labels = {"system": system, "variant": variant, "case": work.case, "shape": work.shape}
        if _run_key({**labels, "repetition": repetition}) in measured:
            continue
        rows = [{**row, "repetition": repetition} for row in measure_run()]
        if system == "verl":
            rows[-1]["note"] = f"{rows[-1]['note']}; {PRECISION}"
        report(f"{system}, {variant}: {work.title()}", rows, options.json)


def _run_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("system", "variant", "case", "shape", "repetition"))


def engine_only(options: argparse.Namespace, work: Work, folder: Path, rate: float) -> None:
    """Update and log-prob pass by variant, in this process."""
    import _engine_step

    checkpointing = options.checkpointing or work.shape in CHECKPOINTED
    overrides_by_name = variants(work, options.budget, checkpointing, options.compile)
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


def summary(rows: list[dict[str, Any]], shape: str) -> list[dict[str, Any]]:
    """Targets and measurements; the last one of repeated measurements."""
    by_key = {(r["system"], r["variant"], r["case"], r["phase"]): r for r in rows if r["shape"] == shape and "s" in r}
    table: list[dict[str, Any]] = []
    for label, key, reference, minimum in RATIOS:
        if key in by_key and reference in by_key:
            ratio = by_key[reference]["s"] / by_key[key]["s"]
            table.append({"measurement": label, "value": ratio, "target": f"≥ {minimum}", "met": ratio >= minimum})
    for limit_shape, key, column, limit in LIMITS:
        value = by_key.get(key, {}).get(column)
        if shape == limit_shape and value is not None:
            _, variant, case, phase = key
            met = value >= limit if limit > 0 else value <= -limit
            target = f"{'≥' if limit > 0 else '≤'} {abs(limit)}"
            table.append(
                {"measurement": f"{phase} ({case}), {variant}: {column}", "value": value, "target": target, "met": met}
            )
    return table


def comparison(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of complete steps by shape, case and system, and their ratio to the step of verl."""
    steps: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["phase"] == "step" and "s" in row and row["system"] != ENGINE:
            key = (row["shape"], row["case"], row["system"], row["variant"])
            steps.setdefault(key, []).append(row)
    table = []
    for (shape, case, system, variant), measured in sorted(steps.items()):
        seconds = statistics.median(row["s"] for row in measured)
        adapters = variant.partition(", LoRA ")[2]
        ours = steps.get((shape, case, "verl", f"all on, LoRA {adapters}" if adapters else "all on"), [])
        times = seconds / statistics.median(row["s"] for row in ours) if ours else None
        peaks = [row["peak GB"] for row in measured if row.get("peak GB")]
        line = {"shape": shape, "case": case, "system": system, "variant": variant, "s": seconds, "× verl": times}
        line |= {"min s": min(row["s"] for row in measured), "max s": max(row["s"] for row in measured)}
        line |= {"runs": len(measured), "peak GB": max(peaks, default=None), "note": measured[-1].get("note")}
        table.append(line)
    return table


def default_budget() -> int:
    return 8192 if torch.cuda.is_available() else 256


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["qwen2.5-0.5b" if cuda else "tiny"])
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["ours", "trl"])
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
    parser.add_argument("--repetitions", type=int, default=1, help="runs of every system, alternating")
    parser.add_argument("--resume", action="store_true", help="skip runs that --json already contains")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0: all weights")
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
    rows = _all_rows(options.json) if options.json else []
    if table := comparison(rows):
        report("complete steps, medians", table)
    for shape in options.shapes:
        if table := summary(rows, shape):
            report(f"targets, {shape}", table)


def measure(options: argparse.Namespace, folder: Path, small: bool) -> None:
    rate = matmul_rate("cpu" if small else "cuda")
    report("matrix product", [{"quantity": "measured rate", "TFLOP/s": rate / 1e12}], options.json)
    repetitions = 1 if options.engine_only else options.repetitions
    for repetition in range(repetitions):
        for shape in options.shapes:
            for case in options.cases:
                work = work_of(case, shape, options.steps, small)
                work_folder = work.write((folder / shape).resolve())
                if options.engine_only:
                    engine_only(options, work, work_folder, rate)
                else:
                    complete_steps(options, work, work_folder, rate, repetition)


def _all_rows(path: str) -> list[dict[str, Any]]:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [row for line in lines for row in json.loads(line)["rows"] if "system" in row]


if __name__ == "__main__":
    main()
