"""Attention over shared prefixes, forward and backward: every implementation by length, and attention of whole rows.

    python benchmarks/prefix_attention.py --cases 128+256x8 4096+512x16

A case is prompt + response x responses of a prompt; prompts are added up to `--tokens` computed tokens. `keys` is the
number of keys of all rows per computed token, by which an implementation is selected. GPU only.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from _report import report

from verl.models.attention import attend
from verl.models.packing import Packing
from verl.models.shared_prefixes import PrefixTree, TreePacking

_CUDA = torch.device("cuda")
_CASES = ("64+64x8", "128+256x8", "512+256x8", "512+1024x8", "1024+512x8", "2048+512x16", "4096+512x16", "4096+4096x4")


def group_tree(prompt: int, response: int, n: int, prompts: int) -> PrefixTree:
    """`n` responses of each of the prompts."""
    shared = np.tile(np.array([0, *[prompt] * (n - 1)]), prompts)
    return PrefixTree(np.full(n * prompts, prompt + response), shared)


def milliseconds(packing: Packing, heads: tuple[int, int, int], repeats: int) -> float:
    """Time of one forward and backward pass of a layer's attention."""
    count, kv, dim = heads
    query, key, value = (
        torch.randn(packing.total, h, dim, device=_CUDA, dtype=torch.bfloat16, requires_grad=True)
        for h in (count, kv, kv)
    )
    gradient = torch.randn_like(query)

    def run() -> None:
        torch.autograd.grad(attend(query, key, value, packing, dim**-0.5), (query, key, value), gradient)

    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def packing_of(tree: PrefixTree, attention: Any) -> Packing:
    """The computed tokens of a tree, or with "whole rows" all tokens of its rows; on the GPU."""
    if attention == "whole rows":
        packing = Packing.from_lengths(tree.lengths.tolist())
    else:
        packing = TreePacking(tree, np.concatenate(tree.paths), attention)
    return packing.with_starts(packing.cu_seqlens.to(_CUDA))


def rows_of(case: str, tokens: int, heads: tuple[int, int, int], repeats: int) -> list[dict[str, Any]]:
    prompt, response, n = map(int, case.replace("x", "+").split("+"))
    tree = group_tree(prompt, response, n, max(1, tokens // (prompt + n * response)))
    selected = TreePacking(tree, np.concatenate(tree.paths)).attention
    results = []
    for attention in ("whole rows", "gather", "merge"):
        row: dict[str, Any] = {"case": case, "attention": attention, "selected": attention == selected}
        row |= {"computed": tree.total, "keys": float(tree.lengths.sum() / tree.total)}
        try:
            row["ms"] = milliseconds(packing_of(tree, attention), heads, repeats)
        except Exception as error:  # noqa: BLE001 - the failure becomes a row of the table
            row["note"] = f"{type(error).__name__}: {str(error)[:200]}"
        results.append(row)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(_CASES))
    parser.add_argument("--tokens", type=int, default=32768, help="computed tokens")
    parser.add_argument("--heads", nargs=3, type=int, default=[12, 2, 128], help="query heads, key heads, size")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("prefix_attention: no GPU found")
        return
    for case in options.cases:
        rows = rows_of(case, options.tokens, tuple(options.heads), options.repeats)
        report(f"Attention over shared prefixes: {case}", rows, options.json)


if __name__ == "__main__":
    main()
