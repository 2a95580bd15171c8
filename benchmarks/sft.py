"""Supervised fine-tuning: tokens/s and MFU of verl and of TRL's SFTTrainer, both packed, with the same tokens.

    python benchmarks/sft.py --shapes qwen2.5-0.5b qwen2.5-1.5b --json FILE
    python benchmarks/sft.py --systems ours --checkpointing --json FILE

Models have random weights of a known shape; rows are ragged (lognormal, mean 512, up to 2048 tokens) and the loss falls
on three quarters of each. Both systems have float32 master weights, compute in bf16, take one optimizer step per step
over about the same number of tokens, and use the same activation checkpointing. TRL packs rows to 4096 tokens: `bfd`
keeps them separate (its attention then needs a dense mask, unless flash-attn is installed), `wrapped` lets tokens
attend across rows, which is a different training but the fastest. verl always keeps rows separate. MFU is the minimal
work of an update (`SFTWork.update_flops_per_token`) relative to the matmul rate measured here. Peak memory is reserved
by torch, used memory allocated by tensors. Each system runs in a process with a time limit; the first two steps are not
counted.

Without a GPU everything is tiny: this only tests the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _ours_step import run_limited
from _report import report
from _sft_systems import SFTWork
from _shapes import SHAPES, matmul_rate

WARM_UP_STEPS = 2
VARIANTS = {"ours": ("packed",), "trl": ("wrapped", "bfd")}


def measure_system(
    options: argparse.Namespace, work: SFTWork, folder: Path, rate: float, system: str, variant: str
) -> Any:
    """One row of the table; after an out-of-memory error a smaller forward pass is tried."""
    labels = {"system": system, "variant": variant, "shape": work.shape}
    budget, smallest = options.budget, work.packed if system == "trl" else work.longest
    while True:
        log = folder / f"{system}-{variant}.log"
        benchmarks = Path(__file__).parent
        command = [sys.executable, str(benchmarks / "_sft_systems.py"), system, str(folder), f"--budget={budget}"]
        command += [f"--packing={variant}"] if system == "trl" else []
        command += ["--checkpointing"] if options.checkpointing else []
        path = os.pathsep.join([str(benchmarks.parent), str(benchmarks), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        problem = run_limited(command, folder, environment, log, options.limit)
        text = log.read_text(errors="replace")
        steps = [json.loads(line.removeprefix("STEP ")) for line in text.splitlines() if line.startswith("STEP ")]
        if len(steps) > WARM_UP_STEPS + 1:
            return {**labels, **_figures(work, steps, rate), "pass": budget, "note": problem}
        if not problem or "OutOfMemoryError" not in text or budget <= smallest:
            return {**labels, "pass": budget, "note": problem or "too few steps"}
        print(f"{system}: {budget} tokens do not fit; trying {budget // 2}", flush=True)
        budget //= 2


def _figures(work: SFTWork, steps: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    counted = steps[WARM_UP_STEPS:]
    seconds = counted[-1]["end"] - steps[WARM_UP_STEPS - 1]["end"]
    tokens = sum(step["tokens"] for step in counted)
    return {
        "s/step": seconds / len(counted),
        "tokens/step": tokens / len(counted),
        "tokens/s": tokens / seconds,
        "MFU": tokens * work.update_flops_per_token() / seconds / rate,
        "peak GB": max(step["peak_gb"] for step in steps),
        "used GB": max(step["used_gb"] for step in steps),
    }


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Throughput of verl relative to each TRL variant of the same shape."""
    ours = {row["shape"]: row["tokens/s"] for row in rows if row["system"] == "ours" and "tokens/s" in row}
    return [
        {
            "measurement": f"{row['shape']}: tokens/s relative to TRL ({row['variant']})",
            "value": ratio,
            "met (≥ 1.5)": ratio >= 1.5,
        }
        for row in rows
        if row["system"] == "trl" and "tokens/s" in row and row["shape"] in ours
        for ratio in [ours[row["shape"]] / row["tokens/s"]]
    ]


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["qwen2.5-0.5b", "qwen2.5-1.5b"] if cuda else ["tiny"]
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=default)
    parser.add_argument("--systems", nargs="+", choices=("ours", "trl"), default=["ours", "trl"])
    parser.add_argument("--budget", type=int, default=16384 if cuda else 256, help="tokens of a forward pass")
    parser.add_argument("--checkpointing", action="store_true", help="checkpoint activations, in all systems")
    parser.add_argument("--steps", type=int, default=10, help=f"the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--limit", type=float, default=200.0, help="maximum seconds per system")
    parser.add_argument("--folder", type=Path, help="keeps models and logs; default: a temporary one")
    parser.add_argument("--json", help="append every table to this file")
    options = parser.parse_args()
    rate = matmul_rate("cuda" if cuda else "cpu")
    report("matrix product", [{"quantity": "measured rate", "TFLOP/s": rate / 1e12}], options.json)
    if "trl" in options.systems and importlib.util.find_spec("trl") is None:
        print("TRL is not installed: skipped", flush=True)
        options.systems = ["ours"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shapes:
            sizes = (128, 512, 2048, 4096) if cuda else (8, 48, 128, 256)
            work = SFTWork(shape, *sizes, options.steps)
            folder = work.write(((options.folder or Path(scratch)) / shape).resolve())
            results = [
                measure_system(options, work, folder, rate, system, variant)
                for system in options.systems
                for variant in VARIANTS[system]
            ]
            report(work.title(), results, options.json)
            rows += results
    if ratios(rows):
        report("relative to TRL", ratios(rows), options.json)


if __name__ == "__main__":
    main()
