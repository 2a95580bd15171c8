"""cuBLASLt by its C interface: runs any algorithm that its heuristics propose for a product (torch uses the first)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["CublasLt"]


class CublasLt:
    """x @ weight.T by any of the algorithms that the heuristics of cuBLASLt propose."""

    _BF16, _FLOAT, _COMPUTE_FLOAT = 14, 0, 68
    _TRANSPOSE_A, _WORKSPACE = 3, 1

    def __init__(self, rows: int, out: int, inner: int, wide: bool) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self._handle = self._create("cublasLtCreate")
        kind = self._FLOAT if wide else self._BF16
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
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        left, right, result = self._layouts
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        a, b, c, space = (ctypes.c_void_p(t.data_ptr()) for t in (weight, x, out, self._space))
        self._call(
            "cublasLtMatmul", self._handle, self._operation, ctypes.byref(one), a, left, b, right, ctypes.byref(zero),
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
