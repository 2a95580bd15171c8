"""Time and memory of `verl view`: start of the server, and every query of the pages, cold and repeated.

    python benchmarks/recording.py build/recording --steps 1000 && python benchmarks/viewer.py build/recording

`first s` is the first request of its kind in a new server, `repeated s` the median of later ones. Goals: 2 s until the
first page is complete, 0.3 s per query, 500 MB. On a busy machine, compare the CPU time of the start with the first
goal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from _report import report

_REPEATS = 5
# Queries of the page that opens first, besides the list of runs.
_FIRST_PAGE = ("metrics", "config", "health")
_CHARTS = ("reward/mean", "response_length/mean", "actor/entropy", "kl/mean", "actor/grad_norm", "timing_s/step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/recording"))
    parser.add_argument("--json", help="append the table to this file")
    options = parser.parse_args()
    begin = time.perf_counter()
    command = [sys.executable, "-m", "verl.viewer", str(options.folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        try:
            rows = measure(process, begin)
        finally:
            process.terminate()
    report(f"verl view {options.folder}", rows, options.json)


def measure(process: subprocess.Popen[str], begin: float) -> list[dict[str, Any]]:
    """Measure a server that was started at `begin`; return the rows of the table."""
    address = _address(process)
    urllib.request.urlopen(address).read()
    rows: list[dict[str, Any]] = [{"query": "start: server responds", "first s": time.perf_counter() - begin}]
    (run,) = _get(address, "runs")
    first = {
        "runs": {},
        "metrics": {"run": 0, "names": json.dumps(_CHARTS)},
        "config": {"run": 0},
        "health": {"run": 0},
    }
    for name, parameters in list(first.items())[1:]:
        _get(address, name, **parameters)
    rows.append({"query": "start: first page complete", "first s": time.perf_counter() - begin})
    rows.append({"query": "start: CPU of the server", "first s": _cpu_seconds(process.pid)})
    for name, parameters in queries(address, run).items():
        seconds, size = [], 0
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            size = len(_read(address, name.split()[0], **parameters))
            seconds.append(time.perf_counter() - start)
        again = statistics.median(seconds[1:])
        rows.append({"query": name, "first s": seconds[0], "repeated s": again, "KB": size / 1e3})
    rows.append({"query": "server memory, MB", "first s": _memory_mb(process.pid)})
    return rows


def queries(address: str, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every query of the pages by name, with parameters of a step in the middle of the run."""
    steps = run["steps"]["trajectories"]
    step = steps[len(steps) // 2]
    uid = _get(address, "groups", run=0, step=step)["columns"]["uid"][3]
    prompt = _get(address, "validation", run=0)["prompts"][0]["uid"]
    return {
        "runs": {},
        "metrics (charts)": {"run": 0, "names": json.dumps(_CHARTS)},
        "metrics (all)": {"run": 0},
        "config": {"run": 0},
        "events": {"run": 0},
        "health": {"run": 0},
        "series": {"run": 0},
        "timeline (1 step)": {"run": 0, "first": step, "last": step},
        "timeline (20 steps)": {"run": 0, "first": step, "last": step + 19},
        "groups": {"run": 0, "step": steps[-1]},
        "group": {"run": 0, "step": step, "uid": uid},
        "answer": {"run": 0, "step": step, "uid": uid, "sample": 1},
        "validation": {"run": 0},
        "validation_answers": {"run": 0, "uid": prompt},
        "search (1 step)": {"run": 0, "step": step, "text": "apples7"},
    }


def _read(address: str, query: str, **parameters: Any) -> bytes:
    return urllib.request.urlopen(f"{address}api/{query}?{urllib.parse.urlencode(parameters)}").read()


def _get(address: str, query: str, **parameters: Any) -> Any:
    return json.loads(_read(address, query, **parameters))


def _address(process: subprocess.Popen[str]) -> str:
    """The address that the server prints when it listens."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://\S+?:\d+/", line):
            return match[0]
    raise RuntimeError("the server did not start.")


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, which other processes of the machine hardly change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1e3  # type: ignore[index]


if __name__ == "__main__":
    main()
