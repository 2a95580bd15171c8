"""The merger: seconds and peak memory, compared with load and save by transformers and the speed of the disk.

A checkpoint of random float32 weights as FSDP ranks write it (`model_world_size_W_rank_R.pt`) becomes a bf16 model.
For comparison the result is loaded completely by transformers and saved. Each runs in its own process; memory is the
peak resident memory minus that after imports.

    python benchmarks/merger.py --shape smollm2-135m
    python benchmarks/merger.py --shape qwen2.5-7b --ranks 8
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _report import report
from _shapes import SHAPES, shape_config

GB = 1e9


def write_checkpoint(shape: str, folder: Path, ranks: int) -> int:
    """Write one file per rank; return the bytes of the largest tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from verl.models.loading import empty_model

    config = shape_config(shape)
    meta_model = empty_model(config, "causal_lm", torch.float32)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder / "huggingface")
    state = dict(meta_model.named_parameters())
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh, parts = init_device_mesh("cpu", (ranks,)), {}
        for name, parameter in state.items():
            chunk = math.ceil(parameter.shape[0] / ranks)
            rows = max(0, min(parameter.shape[0] - rank * chunk, chunk))
            local = torch.empty(rows, *parameter.shape[1:]).uniform_(-0.02, 0.02)
            size, stride = parameter.shape, parameter.stride()
            parts[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
        torch.save(parts, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()
    return max(value.numel() for value in state.values()) * 2


def merge(source: Path, target: Path) -> None:
    from verl.model_merger.__main__ import main

    assert main(["merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(target)]) == 0


def load_and_save(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(target)
    _to_disk(target)


METHODS: dict[str, Callable[[Path, Path], None]] = {"merger": merge, "transformers": load_and_save}


def measure_in_process(method: str, source: Path, target: Path) -> dict[str, Any]:
    """Run `measure` in a child process."""
    command = [sys.executable, __file__, "--measure", method, str(source), str(target)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(process.stdout) if process.returncode == 0 else {"failed": f"exit code {process.returncode}"}


def measure(method: str, source: Path, target: Path) -> None:
    import transformers.modeling_utils  # noqa: F401

    import verl.model_merger.merging  # noqa: F401

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = _resident("VmRSS"), time.perf_counter()
    METHODS[method](source, target)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak GB": (_resident("VmHWM") - before) / GB}))


def _resident(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _to_disk(folder: Path) -> None:
    """Flush all files to disk, as the merger does."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def disk(folder: Path, size: int) -> dict[str, float]:
    """GB per second: write with fsync, and read from disk."""
    data, path = os.urandom(2**20) * (size // 2**20), folder / "disk.bin"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass
    read = time.perf_counter()
    path.unlink()
    return {"write GB/s": len(data) / (written - begin) / GB, "read GB/s": len(data) / (read - dropped) / GB}


def size_of(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.glob(pattern)) / GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "7b"], default="tiny", help="7b: qwen2.5-7b")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks of the checkpoint")
    parser.add_argument(
        "--folder", default=None, help="folder for the files (8 bytes per weight), which are deleted at the end"
    )
    parser.add_argument("--measure", nargs=3, metavar=("METHOD", "FROM", "TO"), help=argparse.SUPPRESS)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], *map(Path, options.measure[1:]))
        return
    shape = "qwen2.5-7b" if options.shape == "7b" else options.shape
    folder = Path(tempfile.mkdtemp(prefix="merger-", dir=options.folder))
    try:
        source = folder / "actor"
        source.mkdir()
        largest = write_checkpoint(shape, source, options.ranks)
        limit = disk(folder, 2**30 if size_of(source, "*.pt") > 1 else 2**26)
        read, row = size_of(source, "*.pt"), measure_in_process("merger", source, folder / "merged")
        written = size_of(folder / "merged", "*.safetensors")
        shutil.rmtree(source)
        table = [
            {
                "method": "merger",
                **row,
                "2 x largest tensor GB": 2 * largest / GB,
                "GB read": read,
                "GB written": written,
            },
            {
                "method": "transformers load + save of the result",
                **measure_in_process("transformers", folder / "merged", folder / "saved"),
                "GB read": written,
                "GB written": written,
            },
            {
                "method": "limit: the disk",
                "seconds": read / limit["read GB/s"] + written / limit["write GB/s"],
                **limit,
            },
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(f"merger {shape}, {options.ranks} ranks, float32 into bf16", table, options.json)


if __name__ == "__main__":
    main()
