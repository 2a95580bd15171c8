"""`python -m verl.utils.sandbox`: what this host can isolate; with `--attack`, the table of attacks as Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from verl.utils.sandbox.languages import LANGUAGES
from verl.utils.sandbox.outcome import REQUIRE
from verl.utils.sandbox.runner import available

# Column: what the host is made to refuse.
LEVELS = {
    "all three": "",
    "Landlock + seccomp": "namespaces",
    "namespaces": "landlock,seccomp",
    "Landlock": "namespaces,seccomp",
    "seccomp": "namespaces,landlock",
    "none": "namespaces,landlock,seccomp",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m verl.utils.sandbox", description=__doc__)
    parser.add_argument("--attack", action="store_true", help="run the attacks at every level of isolation")
    parser.add_argument("--rows", metavar="WITHOUT", help=argparse.SUPPRESS)  # one column, as JSON
    parser.add_argument("--user", type=int, help="with --attack, as root: run everything as this user")
    arguments = parser.parse_args()
    if arguments.rows is not None:
        _print_rows(arguments.rows, arguments.user)
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
    attacks = [row["attack"] for row in columns["all three"]]
    who = "root, whose programs get a user of their own" if os.geteuid() == 0 and user is None else "an ordinary user"
    lines = [
        f"Started by {who}; Linux {platform.release()}, {platform.machine()}, Python {platform.python_version()}.",
        "",
        "| attack | its end | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for index, attack in enumerate(attacks):
        harms = [rows[index]["harm"] for rows in columns.values()]
        cells = [columns["all three"][index]["ended"], *(f"**{harm}**" if harm else "held" for harm in harms)]
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _rows_of(without: str, user: int | None) -> list[dict[str, str]]:
    """The column of a level, from a process on a host that lacks `without`."""
    command = [sys.executable, "-m", "verl.utils.sandbox", "--rows", without]
    if user is not None:
        command += ["--user", str(user)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"the attacks without {without or 'nothing'} ended with {done.returncode}: {done.stderr}")
    rows: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


def _print_rows(without: str, user: int | None) -> None:
    from verl.utils.sandbox import attack_table, seccomp  # Linux only

    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        os.chdir("/")
    if without:
        seccomp.pretend_missing(without.split(","))
    sys.stdout.write(json.dumps({"level": available().level, "rows": attack_table.run_attacks()}) + "\n")


if __name__ == "__main__":
    main()
