"""Hostile programs at every level of isolation, as root and as an ordinary user: contained, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.sandbox_attacks.host import ISOLATION_LEVELS, NOBODY, python_for
from verl.sandbox import REQUIRE

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.processes
# The level that remains without the other features; a host that has less to begin with is skipped.
LEVEL_OF = {
    "all": "full",
    "Landlock + seccomp": "network",
    "namespaces": "network",
    "Landlock": "files",
    "seccomp": "none",
    "none": "none",
}


def rows(column: str, user: int | None) -> list[dict[str, str]]:
    python = python_for(NOBODY if os.geteuid() == 0 else None)
    if python is None:
        pytest.skip("no interpreter that an ordinary user may read")
    script = str(ROOT / "benchmarks/sandbox_attacks.py")
    command = [python, script, "--attack", "--rows", ISOLATION_LEVELS[column]]
    if user is not None:
        command += ["--user", str(user)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if result["level"] != LEVEL_OF[column]:
        pytest.skip(f"this host has level {result['level']} only")
    return result["rows"]  # type: ignore[no-any-return]


def check(column: str, user: int | None) -> None:
    level = REQUIRE.index(LEVEL_OF[column])
    harm = {row["attack"]: row["harm"] for row in rows(column, user) if REQUIRE.index(row["stops_at"]) <= level}
    assert len(harm) >= 9
    assert {attack: words for attack, words in harm.items() if words} == {}


def test_all_is_contained_where_the_host_has_everything() -> None:
    check("all", None)


@pytest.mark.slow
@pytest.mark.parametrize("column", [name for name in ISOLATION_LEVELS if name != "all"])
def test_what_a_level_promises_it_keeps(column: str) -> None:
    check(column, None)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are of an ordinary user already")
@pytest.mark.parametrize("column", list(ISOLATION_LEVELS))
def test_what_a_level_promises_it_keeps_for_an_ordinary_user(column: str) -> None:
    check(column, NOBODY)


@pytest.mark.slow
def test_the_attacks_do_harm_where_nothing_is_in_their_way() -> None:
    harm = {row["attack"]: row["harm"] for row in rows("none", NOBODY if os.geteuid() == 0 else None)}
    unstopped = {attack for attack, words in harm.items() if words}
    assert {
        "reading the home directory",
        "reading another process's memory",
        "sockets to loopback",
        "changing modes and times in the home directory",
        "killing the parent",
        "killing by a descriptor",
        "limits and priority of other processes",
        "symlinks as results",
        "tricks with /proc",
        "leaving shared memory behind",
        "leaving files behind",
    } <= unstopped
