"""Generation: the native engine compared with vLLM, SGLang and HF `generate`.

    python benchmarks/inference.py --systems native vllm --shapes 0.5b 1.5b 7b --json inference.jsonl

tokens/s = generated tokens / (first submit → last finish), prefill included. Weights are random (throughput does not
need trained ones) and lengths are forced. Each engine runs in its own process, so that its memory is released,
with the same settings for all workloads. "read" is the bandwidth limit of a decode step: weights and KV read
once at the speed of a large copy, measured here. "bound" also includes the matmuls, at the rate of a large matmul: the
longer of reading the weights and multiplying by them, plus reading the KV.

Without arguments: on a GPU Qwen2.5-0.5B's shape in bf16, on a CPU SmolLM2-135M's in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from _generation import SYSTEMS, Case, HardwareLimits, cases_for
from _report import report
from _shapes import SHAPES, shape_config, synchronise

Row = dict[str, Any]
_STEP_COLUMNS = ("ms/step", "read ms", "x read", "bound ms", "x bound")


def measure(system: str, shape: str, device: str, quick: bool, repeats: int) -> Iterator[Row]:
    """The workloads on one engine, in this process."""
    cases = cases_for(device, quick)
    config = shape_config(shape, eos_token_id=None, bos_token_id=None)
    limits = HardwareLimits(config, device)
    slots = max(len(case.lengths) for case in cases) if device == "cuda" else len(cases[0].lengths) // 4
    max_len = max(case.prompt + max(case.lengths) for case in cases)
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]]
        config.save_pretrained(folder)
        begin = time.perf_counter()
        engine = SYSTEMS[system](folder, config, device, slots, max_len)
        try:
            print(f"{system} {shape}: start-up took {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            for case in cases:
                yield _row(engine, system, case, limits, slots, repeats)
            if system == "native":
                yield _weight_sync(engine, limits, device)
        finally:
            engine.close()


def _row(engine: Any, system: str, case: Case, limits: HardwareLimits, slots: int, repeats: int) -> Row:
    engine.generate(case.warm_up(), 99)
    seconds = min(engine.generate(case, seed) for seed in range(repeats))
    row = {"case": case.name, "system": system, "tokens/s": round(case.tokens / seconds), "seconds": seconds}
    if case.has_equal_lengths and len(case.lengths) <= slots:
        count = len(case.lengths)
        engine.generate(case.prefill_only(), 49)
        prefill = min(engine.generate(case.prefill_only(), 50 + seed) for seed in range(repeats))
        row |= {
            "prefill s": prefill,
            "ms/step": (seconds - prefill) / (case.lengths[0] - 1) * 1e3,
            "read ms": limits.read_ms(count, case.mean_context),
            "bound ms": limits.lower_bound_ms(count, case.mean_context),
        }
        row |= {"x read": row["ms/step"] / row["read ms"], "x bound": row["ms/step"] / row["bound ms"]}
    return row


def _weight_sync(engine: Any, limits: HardwareLimits, device: str) -> Row:
    """Time of a weight sync with fingerprint check, and of sleep and wake, in one process."""
    from verl.utils.weight_fingerprint import fingerprints

    rollout, times = engine.rollout, []
    begin = time.perf_counter()
    rollout.release(["kv_cache"])  # as during training: frees memory for the second copy of the weights
    sleep_seconds = time.perf_counter() - begin
    source = {name: tensor.to(torch.float32, copy=True) for name, tensor in rollout.weights.items()}
    expected = fingerprints(source, rollout.weight_dtype)
    for version in range(2, 6):
        synchronise(device)
        start = time.perf_counter()
        rollout.begin_update(version, None)
        rollout.load_bucket(source)
        rollout.finish_update(expected)
        synchronise(device)
        times.append(time.perf_counter() - start)
    numbers = sum(t.numel() for t in source.values())
    del source
    begin = time.perf_counter()
    rollout.resume()
    synchronise(device)
    sleep_seconds += time.perf_counter() - begin
    size = numbers * (4 + rollout.weight_dtype.itemsize)
    return {
        "case": "weight sync (fp32 in this process)", "system": "native", "seconds": min(times),
        "sleep + wake s": sleep_seconds, "limit s": size / limits.bandwidth,
    }  # fmt: skip


def side_by_side(rows: list[Row]) -> list[Row]:
    """One row per workload: tokens per second of all systems, ratios of native to each, and native's step time."""
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "tokens/s" in row:
            by_case.setdefault(row["case"], {})[row["system"]] = row
    table = []
    for case, by_system in by_case.items():
        line: Row = {"case": case} | {f"{system} tokens/s": row["tokens/s"] for system, row in by_system.items()}
        native = by_system.get("native")
        if native is not None:
            other_systems = {system: row for system, row in by_system.items() if system != "native"}
            line |= {
                f"native / {system}": native["tokens/s"] / row["tokens/s"] for system, row in other_systems.items()
            }
            line |= {f"native {key}": native[key] for key in _STEP_COLUMNS if key in native}
        table.append(line)
    return table


def measure_in_process(system: str, shape: str, args: argparse.Namespace) -> list[Row]:
    """Run `measure` in a child process; a failure becomes a row."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
        command = [sys.executable, __file__, "--child", results.name, "--systems", system, "--shapes", shape]
        command += ["--device", args.device, "--repeats", str(args.repeats)] + ["--quick"] * args.quick
        code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        rows = [json.loads(line) for line in results]
    if code:
        rows.append({"case": f"failed (exit code {code}): see above", "system": system})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=["native", "generic", "hf"])
    parser.add_argument("--shapes", nargs="+", help=f"of {', '.join(SHAPES)}; 7b means qwen2.5-7b")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller workloads")
    parser.add_argument("--repeats", type=int, default=2 if on_gpu else 1, help="number of runs; the fastest counts")
    parser.add_argument("--json", help="append the result to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = args.shapes or (["qwen2.5-0.5b"] if args.device == "cuda" else ["smollm2-135m"])
    shapes = [shape if shape in SHAPES else f"qwen2.5-{shape}" for shape in shapes]
    if args.child:
        with open(args.child, "a", encoding="utf-8") as out:
            for row in measure(args.systems[0], shapes[0], args.device, args.quick, args.repeats):
                print(json.dumps(row), file=sys.stderr, flush=True)
                print(json.dumps(row), file=out, flush=True)
        return
    for shape in shapes:
        rows = [row for system in args.systems for row in measure_in_process(system, shape, args)]
        report(f"generation, {shape} shape", rows, args.json)
        if compared := side_by_side(rows):
            report(f"generation, {shape} shape, side by side", compared, args.json)


if __name__ == "__main__":
    main()
