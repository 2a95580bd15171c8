"""What the scheduler costs per step when everybody decodes: `python benchmarks/scheduler.py [--sequences 64 512]`.

Plain Python on one core, no model. `loop` is the floor for work in Python: one list append per sequence.
"""

from __future__ import annotations

import argparse
import statistics
import time

from _report import report

from verl.inference.block_manager import BlockManager
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--json", help="append the results to this file")
    options = parser.parse_args()
    rows = []
    for count in options.sequences:
        schedule, postprocess = measure(count, options.steps, options.lag)
        both = [a + b for a, b in zip(schedule, postprocess, strict=True)]
        figures = {
            "schedule µs": statistics.median(schedule),
            "postprocess µs": statistics.median(postprocess),
            "both µs": statistics.median(both),
            "slowest step µs": max(both),
            "loop µs": append_loop(count),
        }
        rows.append({"sequences": count, **{name: round(1e6 * value) for name, value in figures.items()}})
    report("scheduler, decode only, per step", rows, options.json)


def measure(count: int, steps: int, lag: int) -> tuple[list[float], list[float]]:
    """Seconds of each step's two halves. Prompts have different lengths, so that blocks fill up at different steps."""
    params = SamplingParams(max_new_tokens=steps + 64, eos_token_ids=frozenset([0]))
    scheduler = Scheduler(BlockManager(count * (steps // 8 + 32), 16), count, max(8192, count), 16384)
    scheduler.add([Sequence(Request(str(i), list(range(i, i + 64 + i % 16)), params), i) for i in range(count)])
    schedule, postprocess, launched = [], [], []
    for step in range(steps):
        start = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time() - start
        assert plan is not None
        launched.append(plan)
        if len(launched) > lag:
            plan = launched.pop(0)
            rows = len(plan.sample_slots)
            tokens = [1 + (row * 7919 + step) % 50_000 for row in range(rows)]
            log_probs, raw, sampled = ([-1.0 / (1 + row + step) for row in range(rows)] for _ in range(3))
            start = time.thread_time()
            scheduler.postprocess(plan, tokens, log_probs, raw, sampled, 0)
            if not plan.prefills and rows == count:
                schedule.append(planned)
                postprocess.append(time.thread_time() - start)
    return schedule, postprocess


def append_loop(count: int) -> float:
    lists: list[list[int]] = [[] for _ in range(count)]
    times = []
    for step in range(100):
        start = time.thread_time()
        for one in lists:
            one.append(step)
        times.append(time.thread_time() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
