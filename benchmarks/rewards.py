"""Scoring 16,384 answers on 2 cores, 1 % of which hang: the scorer pool compared with simple methods.

    python benchmarks/rewards.py [--answers 16384] [--hanging 0.01] [--timeout 1] [--processes 2] [--json results.jsonl]

Answers in the style of GSM8K (a regular expression: microseconds each) and of MATH (math-verify: milliseconds each, an
eighth as many). "waiting" answers sleep forever, "computing" ones keep a core busy forever. The simple methods are a
loop in the trainer, which requires that nothing hangs, and multiprocessing.Pool with an alarm in each call, which only
works while Python runs signal handlers; with hanging answers it is measured on a part of them and scaled up.

The limit is a lower bound for any method: the time of the function itself on all cores, and for hanging answers one
timeout (waiting), or hanging × timeout / processes (computing, since each occupies a core).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

from _report import report

from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import Sample, Score, ScorerPool

MARKS = {"none": "", "waiting": "<wait>", "computing": "<compute>"}
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=16_384)
    parser.add_argument("--hanging", type=float, default=0.01, help="share of answers that hang")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds per answer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--plain-part", type=float, default=1 / 16, help="share of answers for the simple methods with hanging answers"
    )
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "math"], choices=["gsm8k", "math"])
    parser.add_argument("--kinds", nargs="+", default=list(MARKS), choices=list(MARKS), help="kinds of hanging answers")
    parser.add_argument("--json", default=None, help="append the JSON line to this file")
    args = parser.parse_args()
    rows = []
    for task in args.tasks:
        make, count = {"gsm8k": (gsm8k, args.answers), "math": (math, args.answers // 8)}[task]
        samples = [make(i) for i in range(count)]
        compute_score(**vars(samples[0]))  # imports
        seconds, expected = timed(lambda samples=samples: [compute_score(**vars(sample)) for sample in samples])
        rows.append({"task": task, "hanging": "none", "method": "loop in the trainer", **figures(seconds, samples)})
        for kind in args.kinds:
            rows += compare(task, samples, expected, kind, seconds / args.processes, args)
    report(f"scoring answers, {args.processes} processes, timeout {args.timeout:g} s", rows, args.json)


def compare(
    task: str, samples: list[Sample], expected: list[float], kind: str, work: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    stride = round(1 / args.hanging)
    hanging = set() if kind == "none" else set(range(stride // 2, len(samples), stride))
    answers = [hang(sample, MARKS[kind]) if i in hanging else sample for i, sample in enumerate(samples)]
    limit = {
        "none": work,
        "waiting": max(work, args.timeout),
        "computing": work + len(hanging) * args.timeout / args.processes,
    }[kind]
    name = f"{len(hanging)} {kind}" if hanging else "none"
    rows = []
    with ScorerPool(compute_score, args.processes, args.timeout) as pool:
        pool.score(samples[: 4 * args.processes])  # starts the workers and their imports
        seconds, scores = timed(lambda: pool.score(answers))
    check(scores, expected, hanging)
    rows.append({"task": task, "hanging": name, "method": "scorer pool (used)", **figures(seconds, answers, limit)})
    part = answers[: max(stride, round(len(answers) * args.plain_part)) if hanging else None]
    with multiprocessing.get_context("spawn").Pool(args.processes) as plain:
        call = functools.partial(score_with_alarm, args.timeout)
        plain.map(functools.partial(score_with_alarm, 60.0), samples[: 4 * args.processes], chunksize=1)
        seconds, _ = timed(lambda: list(plain.imap(call, part, chunksize=1 if hanging else 64)))
    method = "multiprocessing.Pool, alarm" + (f" (on {len(part)}, scaled)" if len(part) < len(answers) else "")
    rows.append(
        {"task": task, "hanging": name, "method": method, **figures(seconds * len(answers) / len(part), answers, limit)}
    )
    return rows


def figures(seconds: float, samples: list[Sample], limit: float | None = None) -> dict[str, Any]:
    return {
        "answers": len(samples),
        "seconds": round(seconds, 3),
        "us_per_answer": 1e6 * seconds / len(samples),
        "limit_s": None if limit is None else round(limit, 3),
    }


def check(scores: list[Score], expected: list[float], hanging: set[int]) -> None:
    """Check that the scores are correct."""
    for i, (score, value) in enumerate(zip(scores, expected, strict=True)):
        is_correct = score.kind == "timeout" if i in hanging else (score.error is None and score.value == value)
        assert is_correct, f"answer {i}: {score}, expected {'a timeout' if i in hanging else value}"


def timed(call: Callable[[], list[T]]) -> tuple[float, list[T]]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], raw_prompt: Any = None
) -> float:
    if solution_str.startswith(MARKS["waiting"]):
        time.sleep(1e6)
    while solution_str.startswith(MARKS["computing"]):
        pass
    result = default_compute_score(data_source, solution_str, ground_truth, extra_info)
    return float(result["score"] if isinstance(result, dict) else result)


def score_with_alarm(timeout: float, sample: Sample) -> float | None:
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        return compute_score(**vars(sample))
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def raise_timeout(number: int, frame: Any) -> None:
    raise TimeoutError


def hang(sample: Sample, kind: str) -> Sample:
    return Sample(sample.data_source, kind + sample.solution_str, sample.ground_truth, sample.extra_info)


def gsm8k(i: int) -> Sample:
    thought = f"Natalia sold {i % 90} clips in April, and half as many in May. " * 6
    return Sample("openai/gsm8k", f"{thought}\n#### {i % 97}", str(i % 89), {"index": i})


def math(i: int) -> Sample:
    a, b = i % 41 + 1, i % 23 + 2
    thought = f"We look for two numbers with the sum ${a + b}$ and the product ${a * b}$. " * 6
    truth = f"x^2+{a + b}x+{a * b + (i % 4 == 0)}"
    return Sample("lighteval/MATH", rf"{thought}So it is $\boxed{{(x+{a})(x+{b})}}$.", truth, {"index": i})


if __name__ == "__main__":
    main()
