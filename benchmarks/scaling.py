"""Seconds of a GRPO step on CPU processes, and the controller's share, by number of ranks, samples and tokens.

Complete runs of `main_ppo` on Ray with a tiny model, so the figures show the costs outside of the model: dispatch,
data, rewards, weight sync. Ranks share the cores of this machine: more ranks than cores cannot be faster. Every
response has the maximum length.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from _ours_step import run
from _report import report
from _training_work import Work

# One parameter is varied at a time. The others have their first value, but ranks have their last value when prompts or
# lengths are varied.
RANKS = (1, 2, 4)
PROMPTS = (8, 32)
LENGTHS = (16, 64)
N = 4


def measure(folder: Path, ranks: int, prompts: int, length: int, steps: int, limit: float) -> dict[str, Any]:
    work = Work(f"{ranks}x{prompts}x{length}", "tiny", prompts, N, 32, length, length, steps)
    overrides = [
        f"trainer.n_gpus_per_node={ranks}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    ]
    phase_rows = run(work, work.write(folder), "scaling", overrides, limit, rate=1.0)
    phases = {row["phase"]: row.get("s") for row in phase_rows}
    step = phase_rows[-1]
    return {
        "ranks": ranks,
        "samples": work.samples,
        "response": length,
        "step s": phases["step"],
        **{f"{name} s": phases.get(name) for name in ("update_weights", "gen", "reward", "update_actor")},
        "tokens/s": step.get("tokens/s"),
        "between calls s": step.get("idle s"),
        "controller %": step.get("controller %"),
        "note": step.get("note"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=list(PROMPTS), help=f"prompts per step, {N} samples each"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of a response")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--limit", type=float, default=300.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    first = (options.ranks[0], options.prompts[0], options.lengths[0])
    sizes = [(ranks, *first[1:]) for ranks in options.ranks]
    sizes += [(options.ranks[-1], prompts, first[2]) for prompts in options.prompts[1:]]
    sizes += [(options.ranks[-1], first[1], length) for length in options.lengths[1:]]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            rows.append(measure(Path(folder), *size, options.steps, options.limit))
            print(rows[-1], flush=True)
    report("a GRPO step on CPU processes, tiny model, 32 prompt tokens", rows, options.json)


if __name__ == "__main__":
    main()
