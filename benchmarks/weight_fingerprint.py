"""Fingerprints of a model's weights: time beside a plain sum of the bits, a copy, and reading the memory once.

    python benchmarks/weight_fingerprint.py [--tensors 64] [--size 4096] [--device cuda] [--json results.jsonl]

A copy reads and writes every byte, so half of its time is the floor of anything that reads them all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from _report import report

from verl.utils.weight_fingerprint import fingerprints


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=64 if cuda else 8)
    parser.add_argument("--size", type=int, default=4096 if cuda else 1024, help="rows and columns of each")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default=None, help="append the JSON line to this file")
    args = parser.parse_args()
    shape = (args.size, args.size)
    weights = {
        str(i): torch.randn(shape, device=args.device, dtype=torch.float32).bfloat16() for i in range(args.tensors)
    }
    target = [torch.empty_like(tensor) for tensor in weights.values()]
    ways: dict[str, Callable[[], object]] = {
        "fingerprints": lambda: fingerprints(weights),
        "plain sum of bits": lambda: [t.view(torch.int16).sum(dtype=torch.int64) for t in weights.values()],
        "copy": lambda: torch._foreach_copy_(target, list(weights.values())),
    }
    size = sum(tensor.nbytes for tensor in target)
    found = {name: best_seconds(way, args.repeats, args.device) for name, way in ways.items()}
    found["floor: reading once"] = found["copy"] / 2
    rows = [
        {
            "way": name,
            "ms": 1e3 * seconds,
            "GB/s read": size / seconds / 1e9,
            "times the floor": seconds / (found["copy"] / 2),
        }
        for name, seconds in found.items()
    ]
    report(
        f"fingerprints of {args.tensors} bf16 tensors of {args.size} × {args.size} on {args.device}", rows, args.json
    )


def best_seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Of several runs after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
