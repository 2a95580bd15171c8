"""Hostile programs in the sandbox at every level of isolation: the tables of docs/reference/sandbox.md, as Markdown.

    python benchmarks/sandbox_attacks.py --attack     # access to files, processes and the network
    python benchmarks/sandbox_attacks.py --measure    # peak memory and disk space relative to the limits

A level is simulated by a seccomp filter that denies the other kernel features. As root, `--user 65534` runs the sandbox
as an ordinary user.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))

from tests.support.sandbox_attacks import host  # noqa: E402
from verl.sandbox import available  # noqa: E402


def attack_table(user: int | None) -> str:
    """A row per attack, a column per level: the damage, or "held"."""
    columns = {name: _column(without, user, "--attack") for name, without in host.ISOLATION_LEVELS.items()}
    lines = [_machine(user), "", *_header("attack", "ended by", *columns)]
    for index, row in enumerate(columns["all"]):
        harms = [rows[index]["harm"] for rows in columns.values()]
        cells = [row["ended"], *(f"**{harm}**" if harm else "held" for harm in harms)]
        lines.append(f"| {row['attack']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def resource_table(user: int | None) -> str:
    """A row per attack on memory or disk space, a column per level that this host has: the peak in MB."""
    has_cgroup = user is None and available().cgroup > 0
    columns = {
        name: _column(without, user, "--measure")
        for name, without in host.RESOURCE_LEVELS.items()
        if has_cgroup or "cgroup" in without.split(",")
    }
    lines = [f"{_machine(user)} Figures in MB.", "", *_header("resource", "limit", *columns)]
    for index, first in enumerate(columns["all"]):
        peaks = [rows[index]["reached"] for rows in columns.values()]
        cells = [f"**{peak:,}**" if peak > 2 * first["limit"] else f"{peak:,}" for peak in peaks]
        lines.append(f"| {first['resource']}: {first['attack']} | {first['limit']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _header(*titles: str) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]


def _machine(user: int | None) -> str:
    caller = "root, whose programs run as a separate user" if os.geteuid() == 0 and user is None else "an ordinary user"
    cores = len(os.sched_getaffinity(0))
    system = f"Linux {platform.release()}, {platform.machine()}, {cores} cores, Python {platform.python_version()}"
    return f"Started by {caller}; {system}."


def _column(without: str, user: int | None, kind: str) -> list[dict[str, Any]]:
    """The rows of one level, from a separate process, because restrictions cannot be undone."""
    command = [sys.executable, __file__, kind, "--rows", without, *([] if user is None else ["--user", str(user)])]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if process.returncode:
        raise RuntimeError(
            f"attacks with disabled features {without or '(none)'}: exit code {process.returncode}: {process.stderr}"
        )
    rows: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])["rows"]
    return rows


def _print_column(without: str, user: int | None, measured: bool) -> None:
    from tests.support.sandbox_attacks import isolation, resources

    if measured and os.geteuid() == 0:
        resources.isolate_measurement()
    host.restrict(without, user)
    if measured:
        rows = resources.measure_attacks(cgroup="cgroup" not in without.split(","))
    else:
        rows = isolation.run_attacks()
    print(json.dumps({"level": available().level, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--attack", action="store_true", help="attacks on the isolation")
    kind.add_argument("--measure", action="store_true", help="attempts to exceed the limits on memory and disk space")
    parser.add_argument("--user", type=int, help="as root: numeric user id, for example 65534")
    parser.add_argument("--rows", metavar="WITHOUT", help=argparse.SUPPRESS)  # one column, as JSON
    arguments = parser.parse_args()
    if arguments.rows is not None:
        _print_column(arguments.rows, arguments.user, arguments.measure)
    else:
        print(resource_table(arguments.user) if arguments.measure else attack_table(arguments.user), end="")


if __name__ == "__main__":
    main()
