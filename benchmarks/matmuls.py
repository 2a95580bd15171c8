"""The matmuls of a decode step one by one: torch's (cuBLAS's first choice), cuBLAS's other choices, and Triton's.

    python benchmarks/matmuls.py --shape 7b --rows 256 512 1024

Each is timed over as many weights as there are layers, so that none comes from a cache, in one CUDA graph. GPU only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _cublas_lt import CublasLt
from _generation import copy_bandwidth
from _report import report
from _shapes import SHAPES, Run, matmul_rate, seconds_each
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


# (rows, width, inner) of a tile, splits, warps, stages.
_TILES = [
    (128, 128, 64, 1, 8, 4),
    (128, 128, 64, 1, 4, 3),
    (128, 256, 64, 1, 8, 3),
    (256, 128, 64, 1, 8, 3),
    (64, 256, 64, 1, 4, 4),
    (128, 128, 64, 2, 8, 4),
    (128, 128, 64, 4, 8, 4),
    (128, 256, 64, 2, 8, 3),
    (256, 128, 64, 2, 8, 3),
    (256, 128, 64, 4, 8, 3),
]
_GATE_TILES = [(128, 64, 64, 1, 4, 4), (128, 128, 64, 1, 8, 3), (256, 64, 64, 1, 8, 3), (128, 64, 128, 1, 8, 3)]


def rows_of(name: str, rows: int, size: tuple[int, int], bandwidth: float, rate: float) -> list[dict[str, Any]]:
    from verl.inference.kernels.matmul import tiled

    out_size, inner = size
    copies = max(1, min(28, (4 << 30) // (out_size * inner * 2)))
    weights = [torch.randn(out_size, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    wide = name == "head"
    expected = linear(x, weights[0]).float()
    read, multiply = out_size * inner * 2 / bandwidth * 1e6, 2 * rows * out_size * inner / rate * 1e6
    found: list[dict[str, Any]] = []

    def add(how: str, run: Run, result: Callable[[], torch.Tensor] | None = None, reference: Any = None) -> None:
        row: dict[str, Any] = {"matmul": name, "rows": rows, "how": how}
        try:
            row["us"] = seconds_each(run, copies) * 1e6
            if result is not None:
                run(0)
                reference = expected if reference is None else reference
                row["error"] = ((result().float() - reference).norm() / reference.norm()).item()
        except Exception as error:  # noqa: BLE001 - a tile that does not compile is a row that says so
            row["how"] += f": {type(error).__name__}: {str(error)[:60]}"
        row |= {
            "read us": read,
            "multiply us": multiply,
            "TFLOP/s": 2e-6 * rows * out_size * inner / row.get("us", 1e9),
        }
        found.append(row)

    if wide:
        add("torch", lambda i: torch.mm(x, weights[i].t(), out_dtype=torch.float32))
    else:
        add("torch", lambda i: linear(x, weights[i]))
        add("torch, transposed", lambda i: torch.mm(weights[i], x.t()))
    out = torch.empty(rows, out_size, device="cuda", dtype=torch.float32 if wide else torch.bfloat16)
    try:
        library = CublasLt(rows, out_size, inner, wide)
        for number, choice in enumerate(library.choices(12)):
            add(
                f"cuBLASLt {number} (waves {choice.waves:.2f}, workspace {choice.workspace >> 10} KB)",
                lambda i, choice=choice: library.run(choice, x, weights[i], out),
                lambda: out,
            )
    except Exception as error:  # noqa: BLE001
        found.append({"matmul": name, "rows": rows, "how": f"cuBLASLt: {error}"[:100]})
    for tile in _TILES:
        splits = tile[3]
        into = torch.empty(splits, rows, out_size, device="cuda", dtype=torch.float32) if splits > 1 else out
        result = (lambda into=into: into.sum(0)) if splits > 1 else (lambda: out)
        add(f"triton {tile}", tiled(x, weights, tile, into, False), result)
    if name == "gate_up":
        from verl.inference.kernels.pointwise import gated_silu

        add("torch, then gate", lambda i: gated_silu(linear(x, weights[i])))
        gated = torch.empty(rows, out_size // 2, device="cuda", dtype=torch.bfloat16)
        reference = gated_silu(linear(x, weights[0])).float()
        for tile in _GATE_TILES:
            add(f"triton with gate {tile}", tiled(x, weights, tile, gated, True), lambda: gated, reference)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("matmuls: there is no GPU here")
        return
    shape = args.shape if args.shape in SHAPES else f"qwen2.5-{args.shape}"
    bandwidth, rate = copy_bandwidth("cuda"), matmul_rate("cuda")
    for name, size in weights_of(shape).items():
        for rows in args.rows:
            found = rows_of(name, rows, size, bandwidth, rate)
            first, rest = found[0], sorted(found[1:], key=lambda row: row.get("us", 1e9))
            report(f"{name} {list(size)}, {rows} rows", [first, *rest[:8]], args.json)


if __name__ == "__main__":
    main()
