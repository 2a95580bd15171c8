"""Decode attention on the paged cache for each launch configuration, compared with reading the KV once.

    python benchmarks/attention.py --shape 7b --cases 256x272 512x272 32x2048

A case is sequences x context. GPU only.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from _report import report
from _shapes import SHAPES, copy_bandwidth, seconds_each

_BLOCK = 16


def rows_of(shape: str, sequences: int, context: int, bandwidth: float) -> list[dict[str, Any]]:
    from verl.inference.kernels import paged_attention

    sizes = SHAPES[shape][1]
    heads, kv = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    dim = sizes["hidden_size"] // heads
    blocks = sequences * -(-context // _BLOCK)
    read = 2 * sequences * context * kv * dim * 2
    copies = max(1, min(8, (4 << 30) // read))
    cache = [torch.randn(2, blocks, _BLOCK, kv, dim, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    tables = torch.randperm(blocks, device="cuda").int().view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    query = torch.randn(sequences, heads, dim, device="cuda", dtype=torch.bfloat16)

    def run(index: int) -> torch.Tensor:
        return paged_attention.decode_attention(query, *cache[index], tables, lengths, dim**-0.5)

    launch_of, default_launch = paged_attention.decode_launch, {}
    paged_attention.decode_launch = lambda *sizes: default_launch.update(launch_of(*sizes)) or default_launch
    results, reference = [], run(0)
    for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
        launch = {"TILE": tile, "num_warps": warps, "num_stages": stages}
        paged_attention.decode_launch = lambda *_, launch=launch: launch  # type: ignore[assignment]
        row: dict[str, Any] = {
            "sequences": sequences,
            "context": context,
            **launch,
            "default": launch == default_launch,
        }
        try:
            row["us"] = us = seconds_each(run, copies) * 1e6
            row |= {"read us": read / bandwidth * 1e6, "x": us / (read / bandwidth * 1e6)}
            assert torch.allclose(run(0), reference, atol=2e-2, rtol=2e-2)
        except Exception as error:  # noqa: BLE001 - an unsupported configuration becomes a row
            row["error"] = f"{type(error).__name__}: {str(error)[:60]}"
        results.append(row)
    paged_attention.decode_launch = launch_of
    results.sort(key=lambda row: row.get("us", 1e9))
    return [row for number, row in enumerate(results) if number < 6 or row["default"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--cases", nargs="+", default=["256x272", "512x272", "256x2048", "32x2048", "8x4096"])
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention: no GPU found")
        return
    shape = args.shape if args.shape in SHAPES else f"qwen2.5-{args.shape}"
    bandwidth = copy_bandwidth("cuda")
    for case in args.cases:
        sequences, context = map(int, case.split("x"))
        report(f"decode attention of {shape}, {case}", rows_of(shape, sequences, context, bandwidth), args.json)


if __name__ == "__main__":
    main()
