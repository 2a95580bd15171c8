"""How long Python's garbage collector stops a generating process: `python benchmarks/pauses.py [--answers 1024]`.

Rounds of short answers by our engine, in a process that has imported what a worker has, as it is and after `settle()`,
which workers do once they are warm. A full collection walks over every object of the process; nothing else runs then.
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


class Watch:
    """Full collections and their seconds."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.pauses.append(time.perf_counter() - self._began)


def measured(what: str, engine: Native, case: Case, rounds: int, watch: Watch) -> dict[str, Any]:
    """A row of the table."""
    watch.pauses.clear()
    objects = len(gc.get_objects())
    seconds = [engine.generate(case, seed=1 + turn) for turn in range(rounds)]
    return {
        "process": what,
        "objects walked over": objects,
        "full collections": len(watch.pauses),
        "rounds": rounds,
        "their seconds": round(sum(watch.pauses), 3),
        "share of the time": f"{sum(watch.pauses) / sum(seconds):.1%}",
        "longest round s": round(max(seconds), 2),
        "shortest s": round(min(seconds), 2),
    }


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b" if cuda else "tiny")
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    case = Case("pauses", (options.tokens,) * options.answers, prompt=64, n=16)
    with tempfile.TemporaryDirectory() as folder:
        config = shape_config(options.shape, eos_token_id=None, bos_token_id=None)
        config.architectures = [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]]
        config.save_pretrained(folder)
        engine = Native(folder, config, "cuda" if cuda else "cpu", min(256, options.answers), 128)
        watch = Watch()
        engine.generate(case, seed=0)
        rows = [measured("as it is", engine, case, options.rounds, watch)]
        freeze_gc()
        rows.append(measured("settled", engine, case, options.rounds, watch))
        engine.close()
    report(f"{options.answers} answers of {options.tokens} tokens a round", rows, options.json)


if __name__ == "__main__":
    main()
