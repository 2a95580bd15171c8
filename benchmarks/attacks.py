"""Servers under attack: outcomes, latency of /health, memory and regular clients, per server.

    python benchmarks/attacks.py [--server sandbox] [--seed 32] [--json results.jsonl] [--details]

Sends the malicious requests of tests/attacks to each server while regular clients use it. "health" is the latency of
GET /health of the attacked server, "with CPU" the same without the time in which the server was runnable but not
scheduled, "idle" the latency of an idle server, probed at the same time on the same machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import report

from tests.attacks.support.campaign import Figures, run_campaign, stored_seeds
from tests.attacks.support.servers import SERVERS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", choices=SERVERS, action="append", help="may be repeated (default: all)")
    seed = "seed of the random combinations (default: the first in seeds.json)"
    parser.add_argument("--seed", type=int, default=stored_seeds()[0], help=seed)
    parser.add_argument("--json", help="file to which the results are appended")
    parser.add_argument("--details", action="store_true", help="print every unacceptable outcome")
    options = parser.parse_args()
    rows = []
    for server in options.server or SERVERS:
        with tempfile.TemporaryDirectory() as folder:
            figures = run_campaign(server, options.seed, Path(folder))
        rows.append(_row(figures))
        print(rows[-1], flush=True)
        if options.details:
            print("\n".join(figures.problems + figures.regular_problems + figures.log_errors))
    report("servers under attack", rows, options.json)


def _row(figures: Figures) -> dict[str, Any]:
    statuses = " ".join(f"{result}:{count}" for result, count in figures.results.items())
    latencies = {"p50 ms": "p50", "p99 ms": "p99", "max ms": "max"}
    return {
        "server": figures.server,
        "attacks": figures.attacks,
        "connections": figures.connections,
        "seconds": figures.seconds,
        "outcomes": statuses,
        "unacceptable": len(figures.problems),
        **{f"health {name}": round(1000 * figures.health_s[key], 1) for name, key in latencies.items()},
        "with CPU max ms": round(1000 * figures.own_health_s["max"], 1),
        "health failed": len(figures.health_failures),
        "idle max ms": round(1000 * figures.control_s["max"], 1),
        **{f"MB {name}": round(figures.memory_mb[name]) for name in ("before", "peak", "after")},
        **{f"descriptors {name}": figures.descriptors[name] for name in ("before", "after")},
        "regular ok": figures.regular["ok"],
        "changed": figures.regular["changed"],
        "failed": figures.regular["failed"],
        "exit code": figures.stop["exit_code"],
        "stop s": figures.stop["seconds"],
    }


if __name__ == "__main__":
    main()
