"""The matrix products of a decode step: by torch (the first choice of cuBLAS) and by other cuBLAS algorithms.

    python benchmarks/matmuls.py --shape 7b --rows 256 512 1024

Each is timed in one CUDA graph over different weights, so that none is cached. GPU only.
"""

from __future__ import annotations

import argparse
import ctypes
from typing import Any

import torch
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
    float32_out = name == "head"
    expected = linear(x, weights[0]).float()
    read, multiply = out_size * inner * 2 / bandwidth * 1e6, 2 * rows * out_size * inner / rate * 1e6
    results: list[dict[str, Any]] = []

    def add(implementation: str, run: Run, result: torch.Tensor | None = None) -> None:
        us = seconds_each(run, copies) * 1e6
        measured_rate = 2e-6 * rows * out_size * inner / us
        row = {
            "matmul": name,
            "rows": rows,
            "implementation": implementation,
            "us": us,
            "read us": read,
            "multiply us": multiply,
        }
        row |= {"TFLOP/s": measured_rate}
        if result is not None:
            run(0)
            row["error"] = ((result.float() - expected).norm() / expected.norm()).item()
        results.append(row)

    if not float32_out:
        add("torch", lambda i: linear(x, weights[i]))
    add("torch, float32 out", lambda i: torch.mm(x, weights[i].t(), out_dtype=torch.float32))
    if name == "qkv":
        bias = torch.randn(out_size, device="cuda", dtype=torch.bfloat16)
        add("torch, with bias", lambda i: linear(x, weights[i], bias))
    out = torch.empty(rows, out_size, device="cuda", dtype=torch.float32 if float32_out else torch.bfloat16)
    library = CublasLt(rows, out_size, inner, float32_out)
    for number, choice in enumerate(library.choices(12)):
        implementation = f"cuBLASLt choice {number} (waves {choice.waves:.2f}, workspace {choice.workspace >> 10} KB)"
        add(implementation, lambda i, choice=choice: library.run(choice, x, weights[i], out), out)
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


class CublasLt:
    """x @ weight.T by any of the algorithms that the heuristics of cuBLASLt propose."""

    _BF16, _FLOAT, _COMPUTE_FLOAT = 14, 0, 68
    _TRANSPOSE_A, _WORKSPACE = 3, 1

    def __init__(self, rows: int, out: int, inner: int, float32_out: bool) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self._handle = self._create("cublasLtCreate")
        kind = self._FLOAT if float32_out else self._BF16
        self._layouts = [
            self._layout(self._BF16, inner, out, inner),
            self._layout(self._BF16, inner, rows, inner),
            self._layout(kind, out, rows, out),
        ]
        self._operation = self._create("cublasLtMatmulDescCreate", self._COMPUTE_FLOAT, self._FLOAT)
        self._call("cublasLtMatmulDescSetAttribute", self._operation, self._TRANSPOSE_A, *_bytes(ctypes.c_int32(1)))
        self._space = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    def choices(self, count: int) -> list[Any]:
        preference = self._create("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_uint64(self._space.numel())
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, self._WORKSPACE, *_bytes(size))
        results, number = (_Choice * count)(), ctypes.c_int()
        left, right, out = self._layouts
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._operation, left, right, out, out, preference, count,
            results, ctypes.byref(number),
        )  # fmt: skip
        return list(results[: number.value])

    def run(self, choice: Any, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        alpha, beta = ctypes.c_float(1.0), ctypes.c_float(0.0)
        left, right, result = self._layouts
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        a, b, c, space = (ctypes.c_void_p(t.data_ptr()) for t in (weight, x, out, self._space))
        self._call(
            "cublasLtMatmul", self._handle, self._operation, ctypes.byref(alpha), a, left, b, right, ctypes.byref(beta),
            c, result, c, result, ctypes.byref(choice.algorithm), space, ctypes.c_size_t(self._space.numel()), stream,
        )  # fmt: skip

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        return self._create("cublasLtMatrixLayoutCreate", kind, *sizes)

    def _create(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with status {code}")


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def _bytes(value: Any) -> tuple[Any, ctypes.c_size_t]:
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


if __name__ == "__main__":
    main()
