"""An optimizer step of the Megatron engine compared with the FSDP engine: one rank, same model, batch and PPO loss.

    python benchmarks/megatron_engine.py --json FILE                       # qwen2.5-1.5b on a GPU
    python benchmarks/megatron_engine.py --checkpointing off --profile     # time by kernel

64 sequences of 128 + ragged responses (mean 900, max 2048), packed, in micro-batches by tokens; float32 master weights,
bf16 compute on a GPU. A step is `forward_backward` of all micro-batches and `optimizer_step`. MFU is the minimal work
of a pass (`Work.forward_flops`) relative to the matmul rate measured here. Needs Megatron-Core (`make setup-megatron`).

Without a GPU everything is tiny, and tests/megatron/shims has to be on PYTHONPATH: this only tests the
script.
"""

from __future__ import annotations

import argparse
import math
import pkgutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _engine_step import STEP, batch, profile_calls
from _report import report
from _shapes import SHAPES, matmul_rate, release_memory, save_random_model, synchronise
from _training_work import Work

from verl.config import ActorConfig, FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, as_config
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching
from verl.workers.roles.policy_loss import PolicyLoss

ACTOR = "actor_rollout_ref.actor"
ENGINES = {
    "fsdp": ("verl.workers.engine.fsdp:FSDPEngine", FSDPConfig, "fsdp_config"),
    "megatron": ("verl.workers.engine.megatron.engine:MegatronEngine", MegatronConfig, "megatron_config"),
}
# Minimum of Megatron's tokens/s relative to FSDP's.
TARGET = 0.9


class Step:
    """An engine and the batch of a step."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, name: str, checkpointing: bool, data: DataProto
    ) -> None:
        engine, config_class, key = ENGINES[name]
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.engine: Any = pkgutil.resolve_name(engine)(
            str(folder),
            model_config=as_config(ModelConfig, {"path": str(folder), "enable_gradient_checkpointing": checkpointing}),
            engine_config=as_config(config_class, {}, at=f"{ACTOR}.{key}"),
            optim=as_config(OptimConfig, {"lr": 1e-6}, at=f"{ACTOR}.optim"),
            grad_clip=1.0,
            total_steps=100,
            device=self.device,
            compile_layers=options.compile,
            background_save=False,
        )
        self.loss = PolicyLoss(as_config(ActorConfig, {}, at=ACTOR))
        self.data, self.micro = data, MicroBatching(max_tokens=options.budget)

    def passes(self) -> dict[str, Any]:
        return self.engine.forward_backward(self.data, self.loss, self.loss.outputs, 1.0, self.micro)

    def run(self) -> tuple[float, float]:
        """Execute a step; return loss and gradient norm."""
        loss = self.passes()["loss"][0]
        return float(loss), self.engine.optimizer_step()["grad_norm"]

    def measure(self, repeats: int) -> dict[str, Any]:
        """Best seconds of passes and of the optimizer, and peak GB, after two warm-up steps."""
        first, _ = self.run(), self.run()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [[self._seconds(part) for part in (self.passes, self.engine.optimizer_step)] for _ in range(repeats)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None
        passes, step = (min(column) for column in zip(*seconds, strict=True))
        return {"passes s": passes, "step s": step, "peak GB": peak, "loss": first[0], "grad norm": first[1]}

    def _seconds(self, part: Callable[[], Any]) -> float:
        synchronise(self.device)
        start = time.perf_counter()
        part()
        synchronise(self.device)
        return time.perf_counter() - start

    def close(self) -> None:
        del self.engine
        release_memory(self.device)


def step_batch(work: Work) -> DataProto:
    """The batch of a step, with the old log-probs of a uniform policy, so that random weights are hardly clipped."""
    data = batch(work)
    uniform = -math.log(work.model_config().vocab_size)
    data.batch["old_log_probs"] = data.batch["response_mask"] * uniform
    return data


def measure_engine(
    options: argparse.Namespace, work: Work, folder: Path, name: str, checkpointing: bool, rate: float
) -> dict[str, Any]:
    """The row of one engine; with `--profile`, also print the table of its kernels."""
    row: dict[str, Any] = {"engine": name, "checkpointing": "on" if checkpointing else "off"}
    begin, step = time.monotonic(), None
    try:
        step = Step(options, folder, name, checkpointing, step_batch(work))
        figures = step.measure(options.steps)
        seconds = figures["passes s"] + figures["step s"]
        row |= {"tokens/s": work.tokens(STEP) / seconds, "MFU": 3 * work.forward_flops(STEP) / seconds / rate}
        row |= figures
        row["note"] = f"{time.monotonic() - begin:.0f} s with set-up"
        if options.profile:
            title = f"{name}, checkpointing {row['checkpointing']}: time of a step by kernel"
            report(title, profile_calls(step.run, step.device), options.json)
    except Exception as error:  # noqa: BLE001 - the failure becomes a row of the table
        import traceback

        traceback.print_exc(file=sys.stdout)
        row["note"] = "out of memory" if "out of memory" in str(error) else f"{type(error).__name__} (see above)"
    finally:
        if step is not None:
            step.close()
    return row


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Megatron's tokens/s and memory relative to FSDP's."""
    by_engine = {(row["engine"], row["checkpointing"]): row for row in rows if "tokens/s" in row}
    table = []
    for (engine, checkpointing), row in by_engine.items():
        other = by_engine.get(("fsdp", checkpointing))
        if engine == "megatron" and other is not None:
            ratio = row["tokens/s"] / other["tokens/s"]
            memory = row["peak GB"] / other["peak GB"] if row["peak GB"] else None
            target = {"target": f"≥ {TARGET}", "met": ratio >= TARGET}
            table.append({"checkpointing": checkpointing, "tokens/s": ratio, "peak GB": memory, **target})
    return table


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-1.5b" if cuda else "tiny")
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), default=list(ENGINES))
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--budget", type=int, default=8192 if cuda else 256, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after two warm-up steps")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--profile", action="store_true", help="profile a step of each engine by kernel")
    parser.add_argument("--json", help="append every table to this file")
    options = parser.parse_args()
    sizes = (8, 8, 128, 900, 2048) if cuda else (2, 4, 16, 24, 64)
    work = Work("engine", options.shape, *sizes, steps=STEP + 1)
    rate = matmul_rate("cuda" if cuda else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        kind = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
        save_random_model(folder, work.model_config(), *kind)
        rows = [
            measure_engine(options, work, folder, name, checkpointing == "on", rate)
            for checkpointing in options.checkpointing
            for name in options.engines
        ]
    report(f"one optimizer step, {'compiled' if options.compile else 'eager'}: {work.title()}", rows, options.json)
    if table := ratios(rows):
        report("Megatron relative to FSDP", table, options.json)


if __name__ == "__main__":
    main()
