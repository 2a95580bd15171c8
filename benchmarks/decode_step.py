"""Where a decode step of the embedded engine goes, kernel by kernel, beside what it takes at least.

    python benchmarks/decode_step.py --shape 7b --sequences 256 512 --context 256

"read" of a part is what it must read at the bandwidth of a large copy: its weights, the KV; "multiply" its products at
the rate of a large one. A second table has the step of prompts of the same number of tokens each.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from typing import Any

import torch
from _generation import Floors
from _report import report
from _shapes import SHAPES, shape_config, synchronise

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.build import BuiltEngine, build_engine
from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams

_STEP_TOKENS = 8192
_seeds = itertools.count()
# What a kernel's name tells of its part of the step, the first that fits.
_PARTS = {
    "attention": ("scaled_dot_product", "_decode", "_varlen", "_join_splits"),
    "sampling": ("_best_of",),
    "norms": ("rms_norm",),
    "gate": ("_gated_silu",),
    "rotation and cache": ("_rotate_and_cache",),
    "matmuls": ("gemm", "nvjet", "cutlass", "splitk", "matmul", "cublas", "::mm", "::addmm"),
}


def part_of(kernel: str) -> str:
    name = kernel.lower()
    return next((part for part, signs in _PARTS.items() if any(sign in name for sign in signs)), "other")


def built(config: Any, device: str, slots: int, max_len: int) -> BuiltEngine:
    """An engine whose weights are small random numbers."""
    keys = {
        "max_num_seqs": slots, "max_model_len": max_len, "load_format": "dummy",
        "max_num_batched_tokens": _STEP_TOKENS, "gpu_memory_utilization": 0.85,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        settings = as_config(ModelConfig, {"path": folder}), as_config(RolloutConfig, keys)
        engine = build_engine(folder, *settings, torch.device(device))
    for tensor in engine.weights.tensors.values():
        tensor.normal_(0.0, 0.02)
    return engine


def spent(run: Any, steps: int, device: str) -> tuple[dict[str, tuple[float, float]], float]:
    """Of `run`, which takes `steps` steps: ms and calls per step of each kernel, and ms per step by the clock."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        seconds = time.perf_counter() - start
    kernels = {}
    for event in found.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        if microseconds:
            kernels[event.key] = (microseconds / steps / 1e3, event.count / steps)
    return kernels, seconds / steps * 1e3


def rows_of(kernels: dict[str, tuple[float, float]], wall: float, floors: dict[str, str]) -> list[dict[str, Any]]:
    """Parts and, under each, its largest kernels."""
    parts: dict[str, list[tuple[float, float, str]]] = {}
    for name, (ms, calls) in kernels.items():
        parts.setdefault(part_of(name), []).append((ms, calls, name))
    rows: list[dict[str, Any]] = [{"part": "the step, by the clock", "ms": wall, "at least": floors.get("all")}]
    for part, members in sorted(parts.items(), key=lambda item: -sum(member[0] for member in item[1])):
        total = sum(member[0] for member in members)
        rows.append(
            {"part": part, "ms": total, "calls": sum(member[1] for member in members), "at least": floors.get(part)}
        )
        for ms, calls, name in sorted(members, reverse=True)[:6]:
            if len(members) > 1:
                rows.append({"part": f"    {name[:70]}", "ms": ms, "calls": calls})
    return rows


def decode_rows(engine: BuiltEngine, floors: Floors, sequences: int, context: int, device: str) -> list[dict[str, Any]]:
    steps = 10 if device == "cuda" else 2
    _add(engine, sequences, context - 2 * steps, _steps_of_prompts(sequences, context) + 2 * steps + 1)
    for _ in range(_steps_of_prompts(sequences, context)):
        engine.engine.step()
    engine.engine.drain()

    def run() -> None:
        for _ in range(steps):
            engine.engine.step()
        engine.engine.drain()

    run()  # records the graphs
    kernels, wall = spent(run, steps, device)
    engine.engine.clear()
    weights, kv = floors.read_ms(sequences, 0), floors.read_ms(sequences, context) - floors.read_ms(sequences, 0)
    at_least = {
        "all": f"{weights + kv:.2f} read",
        "matmuls": f"{weights:.2f} read, {floors.multiply_ms(sequences):.2f} multiply",
        "attention": f"{kv:.2f} read",
    }
    return rows_of(kernels, wall, at_least)


def prefill_rows(engine: BuiltEngine, floors: Floors, tokens: int, context: int, device: str) -> list[dict[str, Any]]:
    """A step of as many prompts as fill it."""
    for _ in range(2):
        _add(engine, tokens // context, context, 1)
        kernels, wall = spent(engine.engine.step, 1, device)
        engine.engine.drain()
    return rows_of(kernels, wall, {"matmuls": f"{floors.multiply_ms(tokens):.2f} multiply"})


def _steps_of_prompts(sequences: int, context: int) -> int:
    """Steps until all are decoded; those whose prompts came first are decoded meanwhile."""
    return -(-sequences * context // (_STEP_TOKENS - sequences)) + 1


def _add(engine: BuiltEngine, sequences: int, prompt: int, new: int) -> None:
    """Requests with prompts that no other has."""
    seed = next(_seeds)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(engine.model.vocab_size, (sequences, prompt), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    engine.engine.add(Sequence(Request(f"{seed}-{i}", prompt, params), i) for i, prompt in enumerate(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="qwen2.5-0.5b" if cuda else "smollm2-135m")
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512] if cuda else [4])
    parser.add_argument("--context", type=int, nargs="+", default=[256] if cuda else [64])
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    shape = args.shape if args.shape in SHAPES else f"qwen2.5-{args.shape}"
    config = shape_config(shape, eos_token_id=None, bos_token_id=None)
    floors = Floors(config, args.device)
    longest = max(args.context) + _steps_of_prompts(max(args.sequences), max(args.context)) + 1
    engine = built(config, args.device, max(args.sequences), longest)
    for context in args.context:
        for sequences in args.sequences:
            rows = decode_rows(engine, floors, sequences, context, args.device)
            report(f"a decode step of {shape}: {sequences} sequences of {context} tokens", rows, args.json)
    tokens = _STEP_TOKENS if args.device == "cuda" else 256
    rows = prefill_rows(engine, floors, tokens, min(args.context), args.device)
    report(f"a step of {tokens} tokens of prompts", rows, args.json)


if __name__ == "__main__":
    main()
