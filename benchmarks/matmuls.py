"""The matrix products of a decode step: by torch (the first choice of cuBLAS) and by other cuBLAS algorithms.

    python benchmarks/matmuls.py --shape 7b --rows 256 512 1024

Each is timed in one CUDA graph over different weights, so that none is cached. GPU only.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _cublas_lt import CublasLt
from _report import report
from _shapes import SHAPES, Run, copy_bandwidth, matmul_rate, seconds_each
from torch.nn.functional import linear


def weights_of(shape: str) -> dict[str, tuple[int, int]]:
    """[out, in] of the merged weights of a layer, and of the head."""
    sizes = SHAPES[shape][1]
    hidden, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    width = hidden + 2 * hidden // heads * sizes["num_key_value_heads"]
    return {
        "qkv": (width, hidden),
        "out": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (sizes["vocab_size"], hidden),
    }


def rows_of(name: str, rows: int, size: tuple[int, int], bandwidth: float, rate: float) -> list[dict[str, Any]]:
    out_size, inner = size
    copies = max(1, min(28, (4 << 30) // (out_size * inner * 2)))
    weights = [torch.randn(out_size, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    wide = name == "head"
    expected = linear(x, weights[0]).float()
    read, multiply = out_size * inner * 2 / bandwidth * 1e6, 2 * rows * out_size * inner / rate * 1e6
    results: list[dict[str, Any]] = []

    def add(how: str, run: Run, result: torch.Tensor | None = None) -> None:
        us = seconds_each(run, copies) * 1e6
        rate_here = 2e-6 * rows * out_size * inner / us
        row = {"matmul": name, "rows": rows, "how": how, "us": us, "read us": read, "multiply us": multiply}
        row |= {"TFLOP/s": rate_here}
        if result is not None:
            run(0)
            row["error"] = ((result.float() - expected).norm() / expected.norm()).item()
        results.append(row)

    if not wide:
        add("torch", lambda i: linear(x, weights[i]))
    add("torch, float32 out", lambda i: torch.mm(x, weights[i].t(), out_dtype=torch.float32))
    if name == "qkv":
        bias = torch.randn(out_size, device="cuda", dtype=torch.bfloat16)
        add("torch, with bias", lambda i: linear(x, weights[i], bias))
    out = torch.empty(rows, out_size, device="cuda", dtype=torch.float32 if wide else torch.bfloat16)
    library = CublasLt(rows, out_size, inner, wide)
    for number, choice in enumerate(library.choices(12)):
        how = f"cuBLASLt's choice {number} (waves {choice.waves:.2f}, workspace {choice.workspace >> 10} KB)"
        add(how, lambda i, choice=choice: library.run(choice, x, weights[i], out), out)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("matmuls: no GPU found")
        return
    shape = args.shape if args.shape in SHAPES else f"qwen2.5-{args.shape}"
    bandwidth, rate = copy_bandwidth("cuda"), matmul_rate("cuda")
    for name, size in weights_of(shape).items():
        for rows in args.rows:
            results = rows_of(name, rows, size, bandwidth, rate)
            first, others = results[0], sorted(results[1:], key=lambda row: row["us"])
            report(f"{name} {list(size)}, {rows} rows", [first, *others[:5]], args.json)


if __name__ == "__main__":
    main()
