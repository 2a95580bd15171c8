"""`python -m verl.sandbox`: what this host can isolate.

With `--attack`, the table of attacks as Markdown; with `--measure`, what programs reach against their limits.
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

from verl.sandbox.languages import LANGUAGES
from verl.sandbox.outcome import REQUIRE
from verl.sandbox.runner import available

# Column: what the host is made to refuse.
LEVELS = {
    "all": "",
    "Landlock + seccomp": "namespaces",
    "namespaces": "landlock,seccomp",
    "Landlock": "namespaces,seccomp",
    "seccomp": "namespaces,landlock",
    "none": "namespaces,landlock,seccomp",
}
# Column of `--measure`: the same; "cgroup": the sandbox is created with cgroup=False.
MEASURED_LEVELS = {
    "all + cgroup": "",
    "all": "cgroup",
    "Landlock + seccomp + cgroup": "namespaces",
    "Landlock + seccomp": "namespaces,cgroup",
    "namespaces": "landlock,seccomp,cgroup",
    "Landlock": "namespaces,seccomp,cgroup",
    "none": "namespaces,landlock,seccomp,cgroup",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m verl.sandbox", description=__doc__)
    parser.add_argument("--attack", action="store_true", help="run the attacks at every level of isolation")
    parser.add_argument("--measure", action="store_true", help="measure limits at every level of isolation")
    parser.add_argument("--rows", metavar="WITHOUT", help=argparse.SUPPRESS)  # one column, as JSON
    parser.add_argument(
        "--user", type=int, help="with --attack or --measure, as root: numeric user id, for example 65534 (nobody)"
    )
    arguments = parser.parse_args()
    if arguments.rows is not None:
        _print_rows(arguments.rows, arguments.user, arguments.measure)
    elif arguments.measure:
        sys.stdout.write(measured_table(arguments.user))
    elif arguments.attack:
        sys.stdout.write(table(arguments.user))
    else:
        sys.stdout.write(host_in_words())


def host_in_words() -> str:
    """What this host offers, and what of it is missing."""
    isolation = available()
    lines = [f"{isolation}", *(f"missing: {words}" for words in isolation.missing)]
    for name in REQUIRE:
        met = REQUIRE.index(name) <= REQUIRE.index(isolation.level)
        lines.append(f"sandbox.require={name}: {'yes' if met else 'no'}")
    seen: dict[str, str | None] = {}
    for name, language in LANGUAGES.items():
        seen.setdefault(language.file, f"{name}: {'no ' + tool if (tool := language.missing()) else 'yes'}")
    return "\n".join([*lines, *filter(None, seen.values()), ""])


def table(user: int | None) -> str:
    """Markdown: a row for each attack, a column for each level."""
    columns = {name: _rows_of(without, user) for name, without in LEVELS.items()}
    attacks = [row["attack"] for row in columns["all"]]
    lines = [
        _machine(user),
        "",
        "| attack | its end | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for index, attack in enumerate(attacks):
        harms = [rows[index]["harm"] for rows in columns.values()]
        cells = [columns["all"][index]["ended"], *(f"**{harm}**" if harm else "held" for harm in harms)]
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def measured_table(user: int | None) -> str:
    """Markdown: a row for each way to use memory or disk space, a column for each level that this host has."""
    has_cgroup = user is None and available().cgroup > 0
    columns = {
        name: _rows_of(without, user, "--measure")
        for name, without in MEASURED_LEVELS.items()
        if has_cgroup or "cgroup" in without.split(",")
    }
    lines = [
        f"{_machine(user)} Figures in MB.",
        "",
        "| resource | limit | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for index, first in enumerate(columns["all"]):
        cells = [rows[index]["reached"] for rows in columns.values()]
        shown = [f"**{cell:,}**" if cell > 2 * first["limit"] else f"{cell:,}" for cell in cells]
        lines.append(f"| {first['resource']}: {first['attack']} | {first['limit']} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, ""])


def _machine(user: int | None) -> str:
    who = "root, whose programs get a user of their own" if os.geteuid() == 0 and user is None else "an ordinary user"
    cores = len(os.sched_getaffinity(0))
    host = f"Linux {platform.release()}, {platform.machine()}, {cores} cores, Python {platform.python_version()}"
    return f"Started by {who}; {host}."


def _rows_of(without: str, user: int | None, *options: str) -> list[dict[str, Any]]:
    """The column of a level, from a process on a host that lacks `without`."""
    command = [sys.executable, "-m", "verl.sandbox", "--rows", without, *options]
    if user is not None:
        command += ["--user", str(user)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"the attacks without {without or 'nothing'} ended with {done.returncode}: {done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


def _print_rows(without: str, user: int | None, measured: bool) -> None:
    from verl.sandbox import attack_table, linux, measure, seccomp  # Linux only

    missing = [feature for feature in without.split(",") if feature]
    if measured and os.geteuid() == 0:
        measure.prepare()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        os.chdir("/")
    cgroup = "cgroup" not in missing
    if kernel := [feature for feature in missing if feature != "cgroup"]:
        seccomp.pretend_missing(kernel)
    rows = measure.measure_attacks(cgroup) if measured else attack_table.run_attacks()
    sys.stdout.write(json.dumps({"level": available().level, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
