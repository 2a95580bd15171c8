"""Pauses of a generating process by Python's garbage collector: `python benchmarks/pauses.py [--answers 1024]`.

Rounds of short responses by the native engine, in a process with the imports of a worker, before and after
`freeze_gc()`, which workers call after their warm-up. A full collection traverses every tracked object of the process
and stops all threads.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from typing import Any

import torch
from _generation import Case, Native
from _report import report
from _shapes import SHAPES, shape_config

import verl.trainer.ppo.ray_trainer
import verl.workers.fsdp_workers  # noqa: F401
from verl.utils.resources import freeze_gc


class CollectionTimer:
    """Records the seconds of every full garbage collection."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.pauses.append(time.perf_counter() - self._began)


def measure(process: str, engine: Native, case: Case, rounds: int, timer: CollectionTimer) -> dict[str, Any]:
    """A row of the table."""
    timer.pauses.clear()
    objects = len(gc.get_objects())
    seconds = [engine.generate(case, seed=1 + number) for number in range(rounds)]
    return {
        "process": process,
        "tracked objects": objects,
        "full collections": len(timer.pauses),
        "rounds": rounds,
        "collection s": round(sum(timer.pauses), 3),
        "share of time": f"{sum(timer.pauses) / sum(seconds):.1%}",
        "longest round s": round(max(seconds), 2),
        "shortest round s": round(min(seconds), 2),
    }


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b" if cuda else "tiny")
    parser.add_argument("--answers", type=int, default=1024, help="responses per round")
    parser.add_argument("--tokens", type=int, default=20, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=16, help="rounds before and after freeze_gc()")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    case = Case("pauses", (options.tokens,) * options.answers, prompt=64, n=16)
    with tempfile.TemporaryDirectory() as folder:
        config = shape_config(options.shape, eos_token_id=None, bos_token_id=None)
        config.architectures = [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]]
        config.save_pretrained(folder)
        engine = Native(folder, config, "cuda" if cuda else "cpu", min(256, options.answers), 128)
        timer = CollectionTimer()
        engine.generate(case, seed=0)
        rows = [measure("default", engine, case, options.rounds, timer)]
        freeze_gc()
        rows.append(measure("after freeze_gc()", engine, case, options.rounds, timer))
        engine.close()
    report(f"{options.answers} responses of {options.tokens} tokens per round", rows, options.json)


if __name__ == "__main__":
    main()
