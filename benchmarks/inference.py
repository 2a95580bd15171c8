"""Generation: the embedded engine beside HF `generate` and transformers' continuous batching, in one run.

tokens/s = generated tokens / (first submit → last finish), prefill included. Weights are random (throughput does not
need trained ones) and lengths are forced through each request's max_new_tokens. The floor beside our decode steps is
reading the weights and the KV once per step at the bandwidth measured here by a large copy.

On a GPU: Qwen2.5-0.5B's shape in bf16. On a CPU: SmolLM2-135M's shape in fp32, lengths ragged 8:1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _report import report
from _shapes import SHAPES, save_random_model, shape_config

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.build import build_engine
from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams
from verl.workers.rollout.native_rollout import NativeRollout


class Bench:
    """A saved random model and the figures that limit it."""

    def __init__(self, shape: str, device: str, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.path = str(folder)
        self.config = config = shape_config(shape, eos_token_id=None, bos_token_id=None)
        save_random_model(folder, config, self.dtype)
        self.bandwidth = _copy_bandwidth(self.device)
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).parameters()
        self.weight_bytes = sum(parameter.numel() for parameter in parameters) * self.dtype.itemsize
        head = config.hidden_size // config.num_attention_heads
        self.kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head * self.dtype.itemsize

    def floor_step(self, sequences: int, mean_length: float) -> float:
        """Seconds to read weights and KV once."""
        return (self.weight_bytes + sequences * mean_length * self.kv_bytes) / self.bandwidth

    def settings(self, slots: int, max_len: int, **native: Any) -> tuple[str, ModelConfig, RolloutConfig, torch.device]:
        """What an engine of `slots` sequences is made from."""
        keys = {
            "max_num_seqs": slots,
            "max_model_len": max_len,
            "max_num_batched_tokens": 8192 if self.device.type == "cuda" else 1024,
            "gpu_memory_utilization": 0.5,
            "engine_kwargs": {"native": native},
        }
        return self.path, as_config(ModelConfig, {"path": self.path}), as_config(RolloutConfig, keys), self.device

    def rollout(self, slots: int, max_len: int, **native: Any) -> NativeRollout:
        return NativeRollout(*self.settings(slots, max_len, **native))


def requests_of(lengths: list[int], prompt: int, n: int, vocab: int, seed: int = 0) -> list[Request]:
    """One request per entry of `lengths`; `n` in a row share a prompt."""
    draw = random.Random(seed)
    requests = []
    for index, length in enumerate(lengths):
        if index % n == 0:
            prompt_ids = [draw.randrange(vocab) for _ in range(prompt)]
        params = SamplingParams(key=index, max_new_tokens=length, ignore_eos=True)
        requests.append(Request(f"{seed}-{index}", prompt_ids, params, group=f"{seed}-{index // n}"))
    return requests


def run_native(bench: Bench, rollout: NativeRollout, lengths: list[int], prompt: int, n: int, seed: int) -> list[float]:
    """Seconds from the first submit to each request's end, in order of ending."""
    ends: list[float] = []
    requests = requests_of(lengths, prompt, n, bench.config.vocab_size, seed)
    _synchronise(bench.device)
    start = time.perf_counter()
    futures = rollout.submit(requests)
    for future in futures:
        future.add_done_callback(lambda _: ends.append(time.perf_counter() - start))
    for future, length in zip(futures, lengths, strict=True):
        assert len(future.result().token_ids) == length
    return sorted(ends)


def native_row(
    bench: Bench, slots: int, lengths: list[int], prompt: int, n: int, repeats: int, what: str, **native: Any
) -> dict[str, Any]:
    max_len = prompt + max(lengths)
    rollout = bench.rollout(slots, max_len, **native)
    try:
        if bench.device.type == "cuda":
            run_native(bench, rollout, lengths, prompt, n, 99)  # compiles kernels, captures graphs
            torch.cuda.reset_peak_memory_stats()
        runs = [run_native(bench, rollout, lengths, prompt, n, seed) for seed in range(repeats)]
        prefill = min(run_native(bench, rollout, [1] * len(lengths), prompt, n, 50 + i)[-1] for i in range(repeats))
    finally:
        rollout.close()
    seconds = min(run[-1] for run in runs)
    best = min(runs, key=lambda run: run[-1])
    steps = sum(lengths) / min(slots, len(lengths))
    mean = prompt + sum(length * length for length in lengths) / (2 * sum(lengths))
    floor = bench.floor_step(min(slots, len(lengths)), mean)
    # Until fewer requests than slots are left, every slot is in use; what comes after is the tail.
    full = best[len(lengths) - slots - 1] if len(lengths) > slots else None
    row = {
        "what": what,
        "system": "verl " + (native.get("model") or rollout.model.__class__.__name__.removesuffix("Model").lower()),
        "sequences": len(lengths),
        "slots": slots,
        "n": n,
        "tokens/s": round(sum(lengths) / seconds),
        "seconds": seconds,
        "ms/step": (seconds - prefill) / steps * 1e3,
        "floor ms/step": floor * 1e3,
        "floor share": floor * steps / max(1e-9, seconds - prefill),
        "prefill tokens/s": round(prompt * len(lengths) / prefill),
        "memory GB": _memory_gb(bench.device),
    }
    if full is not None:
        done = sorted(lengths)  # finishing order is close to this; the sum of all but the tail's tokens is what counts
        tail = sum(done[-slots:]) / 2
        row["tokens/s until the tail"] = round((sum(lengths) - tail) / full)
    del rollout
    _empty(bench.device)
    print(row, file=sys.stderr, flush=True)
    return row


def hf_rows(
    bench: Bench, batch: int, lengths: list[int], prompt: int, what: str, continuous: bool
) -> list[dict[str, Any]]:
    """HF `generate` in batches of `batch`: each batch runs until its longest is done."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.path, dtype=bench.dtype, attn_implementation="sdpa")
    model = model.to(bench.device).eval()
    prompts = [r.prompt_ids for r in requests_of(lengths, prompt, 1, bench.config.vocab_size)]
    rows = []

    if bench.device.type == "cuda":
        model.generate(torch.tensor(prompts[:2], device=bench.device), max_new_tokens=4, pad_token_id=0)
        torch.cuda.reset_peak_memory_stats()
    seconds = _static_batches(model, prompts, lengths, batch)
    rows.append(_hf_row(what, "HF generate", batch, lengths, seconds, bench))
    if continuous:
        try:
            rows.append(
                _hf_row(what, "HF continuous batching", batch, lengths, _continuous(model, prompts, lengths), bench)
            )
        except Exception as error:  # noqa: BLE001 - a peer that cannot run here is a row that says so
            rows.append({"what": what, "system": f"HF continuous batching: {type(error).__name__}: {error}"[:120]})
    del model
    _empty(bench.device)
    return rows


def _static_batches(model: Any, prompts: list[list[int]], lengths: list[int], batch: int) -> float:
    _synchronise(model.device)
    start = time.perf_counter()
    for at in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[at : at + batch], device=model.device)
        longest = max(lengths[at : at + batch])
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
        )  # fmt: skip
    _synchronise(model.device)
    return time.perf_counter() - start


def _continuous(model: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(lengths),
        eos_token_id=-1,
        pad_token_id=0,
    )
    model.generate_batch(inputs=prompts[:4], generation_config=settings)
    _synchronise(model.device)
    start = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=settings)
    _synchronise(model.device)
    return time.perf_counter() - start


def _hf_row(what: str, system: str, batch: int, lengths: list[int], seconds: float, bench: Bench) -> dict[str, Any]:
    return {
        "what": what,
        "system": system,
        "sequences": len(lengths),
        "slots": batch,
        "n": 1,
        "tokens/s": round(sum(lengths) / seconds),
        "seconds": seconds,
        "memory GB": _memory_gb(bench.device),
    }


def hand_over_row(bench: Bench) -> dict[str, Any]:
    """Weights of another copy into the engine, with the fingerprint check, in one process."""
    from verl.utils.weight_fingerprint import fingerprints

    rollout = bench.rollout(32, 512)
    try:
        source = {name: tensor.to(torch.float32, copy=True) for name, tensor in rollout.weights.items()}
        expected = fingerprints(source, bench.dtype)
        times = []
        for version in range(1, 8):
            _synchronise(bench.device)
            start = time.perf_counter()
            rollout.begin_update(version, None)
            rollout.load_bucket(source)
            _synchronise(bench.device)
            copied = time.perf_counter()
            rollout.finish_update(expected)
            _synchronise(bench.device)
            times.append((time.perf_counter() - start, copied - start))
        start = time.perf_counter()
        rollout.release(["kv_cache"])
        rollout.resume()
        _synchronise(bench.device)
        asleep = time.perf_counter() - start
    finally:
        rollout.close()
    total, copied = min(times)
    size = sum(t.numel() for t in source.values()) * (4 + bench.dtype.itemsize)
    return {
        "what": "weight hand-over in one process (fp32 → engine)",
        "ms": total * 1e3,
        "of which copy ms": copied * 1e3,
        "floor ms": size / bench.bandwidth * 1e3,
        "sleep + wake ms": asleep * 1e3,
    }


def profile_rows(bench: Bench, slots: int, steps: int = 5) -> list[dict[str, Any]]:
    """Milliseconds per decode step by kernel (GPU) or operator (CPU), the largest first."""
    from torch.profiler import ProfilerActivity, profile

    cuda = bench.device.type == "cuda"
    engine = build_engine(*bench.settings(slots, 512)).engine
    requests = requests_of([256] * slots, 128, 8, bench.config.vocab_size)
    engine.add(Sequence(request, serial) for serial, request in enumerate(requests))
    for _ in range(20):  # the prompts, and what a first step costs
        engine.step()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            engine.step()
        engine.drain()
    spent = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e) for e in found.key_averages()]
    spent.sort(key=lambda entry: -entry[0])
    return [{"what": e.key[:60], "ms": time_us / steps / 1e3, "calls": e.count / steps} for time_us, e in spent[:14]]


def ragged_lengths(count: int, mean: int, longest: int, seed: int = 1) -> list[int]:
    """Exponential lengths around `mean`, cut at `longest`, at least 8."""
    draw = random.Random(seed)
    return [max(8, min(longest, round(draw.expovariate(1 / mean)))) for _ in range(count)]


def _copy_bandwidth(device: torch.device) -> float:
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        _synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory_gb(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def on_gpu(bench: Bench, quick: bool, peers: bool) -> list[dict[str, Any]]:
    fixed, prompt = 256, 128
    rows = []
    for count in (256, 512) if quick else (32, 256, 512, 1024):
        what = f"{count} × {prompt}+{fixed}"
        rows.append(native_row(bench, count, [fixed] * count, prompt, 1, 3, what))
        if count in (256, 512):
            rows.append(native_row(bench, count, [fixed] * count, prompt, 8, 3, what))
    rows.append(native_row(bench, 256, [fixed] * 256, prompt, 1, 2, f"256 × {prompt}+{fixed}", model="generic"))
    lengths = ragged_lengths(2048, 128, 1024)
    rows.append(native_row(bench, 256, lengths, prompt, 1, 2, "2048 ragged (mean 128, max 1024)"))
    if peers:
        rows += hf_rows(bench, 256, [fixed] * 256, prompt, f"256 × {prompt}+{fixed}", continuous=not quick)
    return rows


def on_cpu(bench: Bench, quick: bool, peers: bool) -> list[dict[str, Any]]:
    draw = random.Random(3)
    count, prompt = (16, 16) if quick else (64, 32)
    longest = 32 if quick else 128
    # Ragged 8:1 — lengths spread evenly, on a log scale, from an eighth of the longest to the longest.
    lengths = [round(longest / 8 ** draw.random()) for _ in range(count)]
    slots = count // 4
    what = f"{count} ragged 8:1 (max {longest}), {slots} at a time"
    rows = [native_row(bench, slots, lengths, prompt, 1, 1, what)]
    rows.append(native_row(bench, slots, lengths, prompt, 4, 1, what))
    rows.append(native_row(bench, slots, lengths, prompt, 1, 1, what, model="generic"))
    return rows + (hf_rows(bench, slots, lengths, prompt, what, continuous=False) if peers else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: qwen2.5-0.5b on a GPU, smollm2-135m on a CPU")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--ours-only", action="store_true", help="leave the others out")
    parser.add_argument("--profile", action="store_true", help="also where the time of a decode step goes")
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    shape = args.shape or ("qwen2.5-0.5b" if args.device == "cuda" else "smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, args.device, Path(folder))
        measure = on_gpu if args.device == "cuda" else on_cpu
        rows = measure(bench, args.quick, not args.ours_only)
        report(f"generation, {shape} shape, {str(bench.dtype).removeprefix('torch.')}", rows, args.json)
        report("weight hand-over and sleep", [hand_over_row(bench)], args.json)
        if args.profile:
            slots = 256 if args.device == "cuda" else 16
            report(f"a decode step of {slots} sequences", profile_rows(bench, slots), args.json)


if __name__ == "__main__":
    main()
