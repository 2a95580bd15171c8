"""Milliseconds of the fsdp engine's optimizer step and of its parts, with the time that memory bandwidth allows.

    python benchmarks/optimizer_step.py                  # 1.5B on a GPU, a tiny model on a CPU
    python benchmarks/optimizer_step.py --json FILE

Gradients and weights are float32; the gradient is clipped. `limit ms` is the time to read and write the bytes of a part
once at the bandwidth of a large copy, measured in the same run. The rest is time on the host and in small kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import report
from _shapes import SHAPES, synchronise
from prefix_sharing import build_engine

# Float32 values read and written per weight.
_VALUES = {"norms": 2, "clip": 2, "AdamW": 7}


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-1.5b" if cuda else "tiny")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="append the table to this file")
    options = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    engine = build_engine(options.shape, device, longest=4096, compiled=False)
    optimizer = engine.optimizer

    def fill_gradients() -> None:
        for parameter in optimizer._named.values():
            parameter.grad = torch.full_like(parameter.detach(), 1e-2)
        engine._step_tokens = 1.0

    fill_gradients()
    engine.optimizer_step()  # allocates the moments
    parts: dict[str, Callable[[], Any]] = {
        "norms": optimizer.norms,
        "clip": lambda: optimizer.scale_gradients(0.999),
        "AdamW": optimizer.step,
        "whole step": engine.optimizer_step,
    }
    per_value = optimizer.elements * 4 / bandwidth(device)
    rows = []
    for name, part in parts.items():
        row = {"part": name, "ms": 1e3 * median_seconds(part, fill_gradients, options.repeats, device)}
        rows.append(row | {"limit ms": 1e3 * per_value * _VALUES.get(name, sum(_VALUES.values()))})
    report(f"Optimizer step, {options.shape}, {optimizer.elements / 1e9:.2f} billion weights", rows, options.json)


def median_seconds(part: Callable[[], Any], prepare: Callable[[], None], repeats: int, device: str) -> float:
    seconds = []
    for _ in range(repeats):
        prepare()
        synchronise(device)
        start = time.perf_counter()
        part()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bandwidth(device: str) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.zeros(1 << (28 if device == "cuda" else 24), device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), lambda: None, 5, device)
    return 2 * source.nbytes / seconds


if __name__ == "__main__":
    main()
