"""A 7B model on one GPU, full fine-tuning and LoRA, with automatic placement: three steps, a checkpoint and a resume.

    python benchmarks/large_model.py --json FILE                  # LoRA rank 32, then full fine-tuning
    python benchmarks/large_model.py --modes lora --json FILE
    python benchmarks/large_model.py --checkpoints /mnt/disk      # another disk; full fine-tuning needs 85 GiB there

32 prompts × 8 responses of 256 + 512 tokens, one optimizer step per batch, random weights. `full`: no keys of memory or
placement are set, `trainer.auto_memory` decides; `full, larger micro-batches`: of 24,576 tokens. `lora`: activations
are not checkpointed, and a micro-batch has one prompt with its responses; `lora, checkpointed`: without these keys.
`step, s` and the seconds of its phases are means without the first step. The resumed run trains one more step from the
checkpoint of step 3, which has no exported model. If the disk has too little space for a checkpoint, none is saved.

Without a GPU the model is tiny: this only tests the script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _ours_step import ACTOR, MODEL, command, run_limited, training_steps
from _report import report
from _startup_run import logged_phases
from _training_work import Work

HERE = Path(__file__).parent
STEPS = 3
# A checkpoint of full fine-tuning: weights and two moments in float32 of 7.6e9 parameters.
_FULL_BYTES = 12 * 7.62e9
_SAVED = f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]"
_PHASES = ("update_weights", "gen", "reward", "adv", "update_actor")
# Overrides of each mode; those with adapters also set their rank.
MODES: dict[str, list[str]] = {
    "lora": [f"{MODEL}.enable_gradient_checkpointing=False", f"{ACTOR}.ppo_max_token_len_per_gpu=5120"],
    "full": [],
    "lora, checkpointed": [],
    "full, larger micro-batches": [f"{ACTOR}.ppo_max_token_len_per_gpu=24576"],
}


def work_of(steps: int) -> Work:
    if torch.cuda.is_available():
        return Work("large", "qwen2.5-7b", prompts=32, n=8, prompt_length=256, mean=512, longest=512, steps=steps)
    return Work("large", "tiny", prompts=4, n=4, prompt_length=32, mean=16, longest=16, steps=steps)


def measure(mode: str, folder: Path, checkpoints: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the run and of the resumed run of a mode."""
    checkpoint_folder = checkpoints / mode
    keys = [f"{ACTOR}.use_dynamic_bsz=True", f"trainer.default_local_dir={checkpoint_folder}"]
    adapters = mode.startswith("lora")
    keys += [*MODES[mode], *([f"{MODEL}.lora_rank={options.lora_rank}"] if adapters else [])]
    saves = adapters or not torch.cuda.is_available() or has_space_for_full(checkpoints)
    saves = saves and not options.no_checkpoints
    keys += [_SAVED] if saves else []
    rows = [{"mode": mode, "run": f"{STEPS} steps", **run(mode, folder, keys, STEPS, options.limit)}]
    if not saves and not options.no_checkpoints:
        rows[0].setdefault("note", f"no checkpoint: {checkpoints} is too small")
    if saves and rows[0]["steps"] == STEPS:
        rows[0]["checkpoint GB"] = (
            sum(file.stat().st_size for file in checkpoint_folder.rglob("*") if file.is_file()) / 2**30
        )
        keys += ["trainer.resume_mode=auto"]
        rows.append({"mode": mode, "run": "resumed, 1 step", **run(mode, folder, keys, STEPS + 1, options.limit)})
    shutil.rmtree(checkpoint_folder, ignore_errors=True)
    return rows


def has_space_for_full(checkpoints: Path) -> bool:
    """Whether a checkpoint of full fine-tuning fits on the disk of this folder."""
    return shutil.disk_usage(checkpoints).free > _FULL_BYTES


def run(mode: str, folder: Path, keys: Sequence[str], steps: int, limit: float) -> dict[str, Any]:
    """Train up to step `steps`; return seconds and memory of the steps, seconds of the start-up, and any problem."""
    work, log = work_of(steps), folder / f"{mode}-{steps}.log"
    name = mode.replace(", ", "-").replace(" ", "-")
    metrics = folder / "runs" / "training_step" / name / "metrics.jsonl"
    before = len(training_steps(metrics))
    environment = {"RAY_ADDRESS": "local", **os.environ, "HF_HUB_OFFLINE": "1", "WORKER_CLOCK": os.devnull}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    begin = time.monotonic()
    problem = run_limited(command(work, folder, name, list(keys)), folder, environment, log, limit)
    total = time.monotonic() - begin
    steps_done = training_steps(metrics)[before:]
    measured = steps_done[1:] or steps_done
    row: dict[str, Any] = {"steps": len(steps_done)}
    if steps_done:
        row |= {"step, s": _mean(measured, "timing_s/step"), "first step, s": steps_done[0]["timing_s/step"]}
        row |= {f"{phase}, s": _mean(measured, f"timing_s/{phase}") for phase in _PHASES}
        row["peak GB"] = max(
            (v for step in steps_done for k, v in step.items() if k.startswith("memory_gb/")), default=None
        )
    row["start-up, s"] = sum(seconds for _, seconds in logged_phases(log.read_text(errors="replace")))
    row["command, s"] = total
    return row | ({"note": problem} if problem else {})


def _mean(steps: Sequence[dict[str, float]], key: str) -> float:
    return sum(step.get(key, 0.0) for step in steps) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["lora", "full"])
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints; default: a temporary one")
    parser.add_argument("--no-checkpoints", action="store_true", help="only the three steps")
    parser.add_argument("--limit", type=float, default=300.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append the tables to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = work_of(STEPS + 1).write(Path(scratch) / "work")
        checkpoints = (options.checkpoints or Path(scratch) / "checkpoints").resolve()
        checkpoints.mkdir(parents=True, exist_ok=True)
        for mode in options.modes:
            report(f"{mode}: {work_of(STEPS).title()}", measure(mode, folder, checkpoints, options), options.json)


if __name__ == "__main__":
    main()
