"""Start-up time of a program in the sandbox, compared with a subprocess and a bare fork.

    python benchmarks/sandbox.py [--runs 200] [--threads 2] [--json results.jsonl]

The program prints one number. Warm: an isolated process is ready (the next one is prepared in a pause between runs);
back to back: none is ready, so its preparation is included; cold: start-up of the sandbox is included. The baseline has
no isolation. The limit: fork, exit and wait of a small process without Python.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _report import report

from verl.sandbox import Sandbox

CODE, OUTPUT = "print(6 * 7)", "42\n"
_PAUSE_SECONDS = 0.03
_FORKS = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    print(time.perf_counter() - began)
"""


def measure(runs: int = 200, threads: int = 2) -> list[dict[str, Any]]:
    """Rows for `_report.report`: latencies in milliseconds, and starts per second of consecutive runs."""
    rows = []
    with Sandbox(require="none", warm=2) as sandbox:

        def warm() -> None:
            assert sandbox.run(CODE).stdout == OUTPUT

        warm()
        label = f"sandbox, {sandbox.isolation}"
        rows.append(_row(f"{label}: warm", _seconds(warm, runs, _PAUSE_SECONDS)))
        rows.append(_row(f"{label}: back to back", _seconds(warm, runs), with_rate=True))
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: warm(), range(runs)))
        rows.append({"case": f"{label}: {threads} threads", "starts/s": runs / (time.perf_counter() - began)})
        with sandbox.session() as session:
            cell = _seconds(lambda: session.execute("6 * 7"), runs)
        rows.append(_row("a cell of a session", cell, with_rate=True))
    rows.append(_row("sandbox: cold, with start-up and shutdown", _seconds(_cold, max(runs // 20, 3))))
    rows.append(
        _row("baseline: subprocess.run([python, '-c', …])", _seconds(_plain, max(runs // 4, 3)), with_rate=True)
    )
    forks = subprocess.run([sys.executable, "-c", _FORKS, str(runs)], capture_output=True, text=True, check=True)
    rows.append(_row("limit: fork, _exit, wait", list(map(float, forks.stdout.split())), with_rate=True))
    return rows


def _cold() -> None:
    with Sandbox(require="none", warm=0) as sandbox:
        assert sandbox.run(CODE).stdout == OUTPUT


def _plain() -> None:
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert process.stdout == OUTPUT


def _seconds(action: Callable[[], object], runs: int, pause: float = 0.0) -> list[float]:
    seconds = []
    for _ in range(runs):
        time.sleep(pause)
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def _row(label: str, seconds: list[float], with_rate: bool = False) -> dict[str, Any]:
    ordered = sorted(seconds)
    row = {
        "case": label,
        "p50 ms": statistics.median(ordered) * 1e3,
        "p99 ms": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)] * 1e3,
    }
    return {**row, "starts/s": len(ordered) / sum(ordered)} if with_rate else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    report("Sandbox: time until a program has run", measure(arguments.runs, arguments.threads), arguments.json)


if __name__ == "__main__":
    main()
