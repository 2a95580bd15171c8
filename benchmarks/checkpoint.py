"""Cost of a checkpoint: blocking seconds, seconds until it is written, host memory, slow-down of generation.

One rank, the training engine alone, random weights; a loop of matrix products and small copies simulates the generation
of the next step. Each of `--saves` saves: begin, generate for `--generation` seconds, one optimizer step, finish. An
engine that only has `save` (an older tree on PYTHONPATH) is measured with it.

    python benchmarks/checkpoint.py --size tiny
    python benchmarks/checkpoint.py --size qwen2.5-7b --optimizer-offload --state-dtype bf16 --sink count
"""

from __future__ import annotations

import argparse
import inspect
import io
import shutil
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from _report import report
from _shapes import SHAPES, shape_config, synchronise

from verl.config import FSDPConfig, ModelConfig, OptimConfig, as_config
from verl.protocol import DataProto
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.fsdp import FSDPEngine

GB = 1e9
_ACTOR = "actor_rollout_ref.actor"
_LARGE = (".distcp", ".safetensors")


class CountingSink:
    """Replaces the large files of a checkpoint: counts bytes and computes checksums, stores nothing."""

    def __init__(self) -> None:
        self.bytes = 0
        real, sink = ChecksumRecorder.open, self

        def open_counting(recorder: ChecksumRecorder, name: Any) -> Any:
            return _CountingFile(sink) if str(name).endswith(_LARGE) else real(recorder, name)

        ChecksumRecorder.open = open_counting  # type: ignore[method-assign]


class _CountingFile(io.BufferedIOBase):
    def __init__(self, sink: CountingSink) -> None:
        self._sink, self._size, self._crc = sink, 0, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._crc = zlib.crc32(data, self._crc)
        self._size += size
        self._sink.bytes += size
        return size


class HostMemory:
    """Peak resident memory of this process and memory of its container during a block."""

    def __enter__(self) -> HostMemory:
        self._done = threading.Event()
        self.before, self.peak = self._now(), self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def columns(self) -> dict[str, float]:
        """Increase of the resident memory; memory of the container, and its cached files."""
        columns = {"resident increase GB": (self.peak["resident"] - self.before["resident"]) / GB}
        columns |= {f"{name} GB": self.peak[name] / GB for name in ("container", "cached files") if name in self.peak}
        return columns

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak = {name: max(size, self.peak[name]) for name, size in self._now().items()}

    def _now(self) -> dict[str, float]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        values = {"resident": float(status["VmRSS"].split()[0]) * 1024}
        group = Path("/sys/fs/cgroup")
        if (group / "memory.current").exists():
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            values |= {"container": float((group / "memory.current").read_text()), "cached files": float(stat["file"])}
        return values


class Generation:
    """Simulated generation: per token a few matrix products, a copy of the result to the host, and some Python."""

    def __init__(self, device: str) -> None:
        size, dtype = (4096, torch.bfloat16) if device == "cuda" else (256, torch.float32)
        self._left, self._right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def rate(self, seconds: float) -> float:
        """Tokens per second, measured for `seconds`."""
        begin, tokens = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            for _ in range(4):
                product = self._left @ self._right
            product[0, :64].float().cpu().tolist()
            sum(range(2000))
            tokens += 1
        return tokens / elapsed


def build(options: argparse.Namespace, device: str) -> FSDPEngine:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        source = AutoModelForCausalLM.from_config(
            shape_config(options.size), dtype=torch.bfloat16 if device == "cuda" else torch.float32
        )
    fsdp = {
        "param_offload": options.param_offload,
        "optimizer_offload": options.optimizer_offload,
        "reshard_after_forward": True,
    }
    optim = {"lr": 1e-6, "state_dtype": options.state_dtype}
    more: dict[str, Any] = {"background_save": False} if options.at_once else {}
    if "saved" in inspect.signature(FSDPEngine).parameters:
        more["saved"] = options.contents
    return FSDPEngine(
        source,
        model_config=as_config(ModelConfig, {"path": "random", "enable_gradient_checkpointing": True}),
        engine_config=as_config(FSDPConfig, fsdp, at=f"{_ACTOR}.fsdp_config"),
        optim=as_config(OptimConfig, optim, at=f"{_ACTOR}.optim"),
        grad_clip=1.0,
        device=device,
        **more,
    )


def rows() -> DataProto:
    ids = torch.arange(2 * 64).view(2, 64) % 500 + 1
    ones = torch.ones_like(ids)
    tensors = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(1) - 1}
    return DataProto.from_dict(tensors | {"responses": ids[:, 32:], "response_mask": ones[:, 32:]})


def update(engine: FSDPEngine, device: str) -> float:
    """Forward, backward and optimizer step; returns the seconds of the optimizer step."""

    def loss(fields: dict[str, torch.Tensor], batch: DataProto, counts: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -fields["log_probs"].mean(), {}

    with engine.on_device():
        engine.forward_backward(rows(), loss, ["log_probs"])
        synchronise(device)
        begin = time.perf_counter()
        engine.optimizer_step()
        synchronise(device)
        return time.perf_counter() - begin


def save(
    engine: FSDPEngine,
    folder: Path,
    contents: list[str],
    device: str,
    seconds: float,
    step_seconds: float,
    in_background: bool,
) -> dict[str, float]:
    """Measure one save with generation and an optimizer step after its start."""
    generation = Generation(device)
    with HostMemory() as memory:
        begin = time.perf_counter()
        is_two_part = hasattr(engine, "begin_save")
        if is_two_part:
            engine.begin_save(folder, contents)
        else:
            with engine.on_device():
                engine.save(folder, contents)
        begin_seconds = time.perf_counter() - begin
        rate = generation.rate(seconds)
        wait_seconds = max(0.0, update(engine, device) - step_seconds)
        if is_two_part:
            engine.finish_save()
        total = time.perf_counter() - begin
    # Blocking saves have written everything before they return.
    written = total if is_two_part and in_background else begin_seconds
    figures = {"blocking s": begin_seconds + wait_seconds, "begin s": begin_seconds}
    figures |= {"optimizer step delay s": wait_seconds, "written after s": written}
    return figures | memory.columns() | {"tokens/s during save": rate}


def limits(folder: Path, device: str, size: int) -> dict[str, float]:
    """GB per second of the disk (with fsync), of a checksum, and of a copy from the device to pinned memory."""
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    seconds = {}
    begin = time.perf_counter()
    with ChecksumRecorder(folder).open("limit.bin") as stream:
        stream.write(data.numpy().data)
    seconds["file with checksum GB/s"] = time.perf_counter() - begin
    (folder / "limit.bin").unlink()
    begin = time.perf_counter()
    zlib.crc32(data.numpy().data)
    seconds["checksum GB/s"] = time.perf_counter() - begin
    if device == "cuda":
        on_device, pinned = data.cuda(), torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for _ in range(2):
            synchronise(device)
            begin = time.perf_counter()
            pinned.copy_(on_device, non_blocking=True)
            synchronise(device)
            seconds["device to host GB/s"] = time.perf_counter() - begin
    return {name: size / elapsed / GB for name, elapsed in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--contents", nargs="+", default=["model", "optimizer", "extra", "hf_model"])
    parser.add_argument("--sink", choices=["disk", "count"], default="disk", help="count: large files are not kept")
    parser.add_argument("--folder", default=None, help="folder for the files, which are deleted at the end")
    parser.add_argument("--saves", type=int, default=2, help="number of saves; the first also allocates the copy")
    parser.add_argument("--generation", type=float, default=None, help="seconds of generation during a save")
    parser.add_argument("--param-offload", action="store_true")
    parser.add_argument("--optimizer-offload", action="store_true")
    parser.add_argument("--state-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--at-once", action="store_true", help="without a copy: training waits for the files")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds = options.generation if options.generation is not None else (15.0 if device == "cuda" else 0.5)
    begin = time.perf_counter()
    engine = build(options, device)
    update(engine, device)
    step_seconds = update(engine, device)
    started = time.perf_counter() - begin
    idle_rate = Generation(device).rate(min(seconds, 5.0))
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    sink = CountingSink() if options.sink == "count" else None
    table = []
    try:
        table.append({"save": "limits"} | limits(folder, device, 2**30 if device == "cuda" else 2**26))
        for number in range(1, options.saves + 1):
            figures = save(
                engine, folder / str(number), options.contents, device, seconds, step_seconds, not options.at_once
            )
            written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if sink is not None:
                written, sink.bytes = written + sink.bytes, 0
            table.append({"save": number} | figures | {"tokens/s without save": idle_rate, "GB": written / GB})
            shutil.rmtree(folder / str(number))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    offloads = [name for name in ("param", "optimizer") if getattr(options, f"{name}_offload")]
    mode = "save" if not hasattr(engine, "begin_save") else "at once" if options.at_once else "in the background"
    title = f"checkpoint {options.size} {mode}: {' '.join(options.contents)}, sink {options.sink}, "
    title += f"offload {' '.join(offloads) or 'none'}, moments {options.state_dtype}, started in {started:.0f} s"
    report(title, table, options.json)


if __name__ == "__main__":
    main()
