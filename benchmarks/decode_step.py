"""Profile of a decode step of the native engine by kernel, compared with the hardware limits of each part.

    python benchmarks/decode_step.py --shape 7b --sequences 256 512 --context 256

"read": time to read the weights or the KV of a part at the bandwidth of a large copy; "multiply": time of its matmuls
at the rate of a large matmul. A second table shows a prefill step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import torch
from _generation import HardwareLimits
from _report import report
from _shapes import SHAPES, shape_config, synchronise

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.build import BuiltEngine, build_engine
from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams

_STEP_TOKENS = 8192
_seeds = itertools.count()
# Substrings of kernel names by part of the step; the first match counts.
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
    return next((part for part, patterns in _PARTS.items() if any(pattern in name for pattern in patterns)), "other")


def random_engine(config: Any, device: str, slots: int, max_len: int) -> BuiltEngine:
    """An engine with small random weights."""
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


def profile_run(run: Any, steps: int, device: str) -> tuple[dict[str, tuple[float, float]], float]:
    """Profile `run`, which executes `steps` steps: (ms, calls) of each kernel and wall-clock ms, all per step."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler_run:
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        seconds = time.perf_counter() - start
    kernels = {}
    for event in profiler_run.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        if microseconds:
            kernels[event.key] = (microseconds / steps / 1e3, event.count / steps)
    return kernels, seconds / steps * 1e3


def rows_of(kernels: dict[str, tuple[float, float]], wall: float, limits: dict[str, str]) -> list[dict[str, Any]]:
    """A row per part, followed by its longest kernels."""
    parts: dict[str, list[tuple[float, float, str]]] = {}
    for name, (ms, calls) in kernels.items():
        parts.setdefault(part_of(name), []).append((ms, calls, name))
    rows: list[dict[str, Any]] = [{"part": "step, wall clock", "ms": wall, "limit": limits.get("all")}]
    for part, members in sorted(parts.items(), key=lambda item: -sum(member[0] for member in item[1])):
        total = sum(member[0] for member in members)
        rows.append(
            {"part": part, "ms": total, "calls": sum(member[1] for member in members), "limit": limits.get(part)}
        )
        for ms, calls, name in sorted(members, reverse=True)[:6]:
            if len(members) > 1:
                rows.append({"part": f"    {name[:70]}", "ms": ms, "calls": calls})
    return rows


def decode_rows(
    engine: BuiltEngine, limits: HardwareLimits, sequences: int, context: int, device: str
) -> list[dict[str, Any]]:
    steps = 10 if device == "cuda" else 2
    _add(engine, sequences, context - 2 * steps, _prefill_steps(sequences, context) + 2 * steps + 1)
    for _ in range(_prefill_steps(sequences, context)):
        engine.engine.step()
    engine.engine.drain()

    def run() -> None:
        for _ in range(steps):
            engine.engine.step()
        engine.engine.drain()

    run()  # captures the CUDA graphs
    kernels, wall = profile_run(run, steps, device)
    engine.engine.clear()
    weights = limits.read_ms(sequences, 0)
    kv = limits.read_ms(sequences, context) - weights
    lower_bounds = {
        "all": f"{weights + kv:.2f} read",
        "matmuls": f"{weights:.2f} read, {limits.matmul_ms(sequences):.2f} multiply",
        "attention": f"{kv:.2f} read",
    }
    return rows_of(kernels, wall, lower_bounds)


def decode_seconds(engine: BuiltEngine, sequences: int, context: int, steps: int, device: str) -> float:
    """Median seconds of a decode step of `sequences` sequences, which begins with `context` tokens each.

    The engine must allow sequences of `longest_measured(...)` tokens.
    """
    _add(engine, sequences, context, longest_measured(sequences, context, steps) - context)
    for _ in range(_prefill_steps(sequences, context)):
        engine.engine.step()
    return time_steps(engine, steps, device)


def time_steps(engine: BuiltEngine, steps: int, device: str) -> float:
    """Return the median seconds of a step: four times `steps` steps of the added sequences, which are then removed."""
    times = []
    for _ in range(4):  # the first captures the CUDA graph
        engine.engine.drain()
        synchronise(device)
        start = time.perf_counter()
        for _ in range(steps):
            engine.engine.step()
        engine.engine.drain()
        synchronise(device)
        times.append((time.perf_counter() - start) / steps)
    engine.engine.clear()
    return statistics.median(times[1:])


def longest_measured(sequences: int, context: int, steps: int) -> int:
    """Tokens of a sequence at the end of `decode_seconds`."""
    return context + _prefill_steps(sequences, context) + 4 * steps + 1


def prefill_rows(
    engine: BuiltEngine, limits: HardwareLimits, tokens: int, context: int, device: str
) -> list[dict[str, Any]]:
    """A prefill step of `tokens` tokens, in prompts of `context` tokens."""
    for _ in range(2):
        _add(engine, tokens // context, context, 1)
        kernels, wall = profile_run(engine.engine.step, 1, device)
        engine.engine.drain()
    return rows_of(kernels, wall, {"matmuls": f"{limits.matmul_ms(tokens):.2f} multiply"})


def _prefill_steps(sequences: int, context: int) -> int:
    """Steps until all prompts are processed; the first sequences are decoded in the meantime."""
    return -(-sequences * context // (_STEP_TOKENS - sequences)) + 1


def _add(engine: BuiltEngine, sequences: int, prompt: int, new: int) -> None:
    """Add requests with unique prompts, so that none is in the prefix cache."""
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
    limits = HardwareLimits(config, args.device)
    longest = max(args.context) + _prefill_steps(max(args.sequences), max(args.context)) + 1
    engine = random_engine(config, args.device, max(args.sequences), longest)
    for context in args.context:
        for sequences in args.sequences:
            rows = decode_rows(engine, limits, sequences, context, args.device)
            report(f"a decode step of {shape}: {sequences} sequences of {context} tokens", rows, args.json)
    tokens = _STEP_TOKENS if args.device == "cuda" else 256
    rows = prefill_rows(engine, limits, tokens, min(args.context), args.device)
    report(f"a prefill step of {tokens} tokens", rows, args.json)


if __name__ == "__main__":
    main()
