"""Runs of TRL's GRPOTrainer (`_trl_step.py`) with a time limit, and the rows of their tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from _ours_step import run_limited
from _training_work import Work

_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory")


def measure_trl(options: argparse.Namespace, work: Work, folder: Path, rate: float, vllm: bool) -> list[dict[str, Any]]:
    """Return the rows of TRL's GRPOTrainer on the same work; after an out-of-memory error a smaller micro-batch is
    tried. `vllm`: with a colocated vLLM and TRL's defaults."""
    micro = min(options.trl_micro or (32 if work.case == "a" else 8), work.samples)
    labels = {
        "system": "trl-vllm" if vllm else "trl",
        "variant": trl_variant(options),
        "case": work.case,
        "shape": work.shape,
    }
    rows: list[dict[str, Any]] = []
    while micro and not rows:
        log = folder / f"{labels['system']}-{work.case}.log"
        command = _command(options, work, folder, micro, vllm)
        problem = run_limited(command, folder, _environment(vllm), log, options.limit)
        text = log.read_text(errors="replace")
        steps = [json.loads(line.removeprefix("STEP ")) for line in text.splitlines() if line.startswith("STEP ")]
        if any(step["step"] > 0 for step in steps):
            rows = _trl_rows(work, [step for step in steps if step["step"] > 0], rate)
            note = f"micro-batches of {micro}; {steps[-1]['precision']}"
            rows[-1]["note"] = note + (f"; {problem}" if problem else "")
        elif problem and any(error in text for error in _OUT_OF_MEMORY) and micro > 1:
            print(f"TRL: {micro} rows do not fit; trying {micro // 2}", flush=True)
            micro //= 2
        else:
            rows = [{"phase": "step", "note": problem or "no step was measured"}]
    return [{**labels, **row} for row in rows]


def trl_variant(options: argparse.Namespace) -> str:
    """The name of the settings of TRL: dtype of its weights, KL, adapters."""
    adapters = f", LoRA {options.lora_rank}" if options.lora_rank else ""
    return options.trl_dtype + (", beta" if options.trl_beta else "") + adapters


def has_trl(vllm: bool) -> bool:
    """Whether TRL, and vLLM if needed, can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("trl", *(("vllm",) if vllm else ())))


def _environment(vllm: bool) -> dict[str, str]:
    benchmarks = Path(__file__).parent
    path = os.pathsep.join([str(benchmarks.parent), str(benchmarks), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if vllm:  # a colocated vLLM joins the trainer's process group
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return environment


def _command(options: argparse.Namespace, work: Work, folder: Path, micro: int, vllm: bool) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).parent / "_trl_step.py"),
        str(folder),
        work.case,
        f"--micro={micro}",
        f"--beta={options.trl_beta}",
        f"--dtype={options.trl_dtype}",
        f"--steps={options.trl_steps}",
        f"--lora-rank={options.lora_rank}",
        *(["--vllm"] if vllm else []),
        *(["--checkpointing"] if options.checkpointing else []),
    ]


def _trl_rows(work: Work, steps: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """A row per phase: means over steps. `between`: the rest of the rollout, such as log-probs of the reference."""
    count = len(steps)
    forward = sum(work.forward_flops(s["step"]) for s in steps) / count
    sampled = sum(int(work.lengths(s["step"]).sum()) for s in steps) / count
    tokens = sum(work.tokens(s["step"]) for s in steps) / count
    mean = {
        name: sum(s["seconds"].get(name, 0.0) for s in steps) / count
        for name in ("generate", "update_weights", "reward", "rollout", "step")
    }
    seconds = {
        "update_weights": mean["update_weights"],
        "gen": mean["generate"],
        "reward": mean["reward"],
        "between": mean["rollout"] - mean["generate"] - mean["update_weights"] - mean["reward"],
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
