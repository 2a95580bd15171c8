"""Programs against the sandbox's limits on memory and disk: fixed ones, and combinations drawn from stored seeds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandbox_attacks.host import NOBODY, python_for
from tests.support.sandbox_attacks.resources import LIMITS
from verl.sandbox import available

ROOT = Path(__file__).parents[2]
SEEDS = (1, 7, 11, 23, 32, 41)
pytestmark = [pytest.mark.slow, pytest.mark.processes]

# The user, and the features that the host lacks.
HOSTS = [
    pytest.param(user, without, id=f"{'nobody' if user else 'caller'}-{without or 'everything'}")
    for user, without in [
        (None, ""),
        (None, "cgroup"),
        (None, "namespaces"),
        (None, "namespaces,cgroup"),
        (NOBODY, "cgroup"),
        (NOBODY, "namespaces,cgroup"),
    ]
]

# In a process of its own, because it enters a cgroup, a mount namespace and a seccomp filter.
MEASURE = """
import json, os, random, sys
from tests.support.sandbox_attacks import host, resources
from tests.support.sandbox_attacks.resource_attacks import RESOURCE_ATTACKS, ResourceAttack
user, without, seeds = json.loads(sys.argv[1])
if os.geteuid() == 0: resources.isolate_measurement()
host.restrict(without, user)
python = [attack for attack in RESOURCE_ATTACKS if attack.language == "python"]
def combination(seed):
    generator = random.Random(seed)
    chosen = generator.sample(python, generator.randint(2, 4))
    lines = []
    for attack in chosen:
        lines += ["if os.fork() == 0:", f"    time.sleep({generator.random() / 4})"]
        lines.append(f"    exec({attack.code!r}, globals())")
    name = f"{seed}: {', '.join(attack.name for attack in chosen)}"
    return ResourceAttack(name, "\\n".join([*lines, "time.sleep(3)"]), generator.choice(["memory", "disk"]))
attacks = [combination(seed) for seed in seeds] if seeds else RESOURCE_ATTACKS
print(json.dumps(resources.measure_attacks("cgroup" not in without, attacks)))
"""


def measured(user: int | None, without: str, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if "cgroup" not in without and not available().cgroup:
        pytest.skip("this process may not create a cgroup")
    python = python_for(user)
    if python is None:
        pytest.skip("no interpreter that an ordinary user may read")
    options = json.dumps([user, without, seeds])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-c", MEASURE, options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def over_their_bounds(rows: list[dict[str, Any]], without: str) -> dict[str, int]:
    """With a cgroup, memory and files in memory have one limit; without, the supervisor may detect an excess late."""
    in_memory = LIMITS.memory_mb + LIMITS.file_mb
    bounds = {"memory": 2 * LIMITS.memory_mb if "cgroup" in without else in_memory + 32, "disk": 2 * LIMITS.file_mb}
    if "namespaces" not in without:
        bounds["disk"] = bounds["memory"] + LIMITS.file_mb  # measured as memory, with the rest of the program's
    return {row["attack"]: row["reached"] for row in rows if row["reached"] > bounds[row["resource"]]}


@pytest.mark.parametrize(("user", "without"), HOSTS)
def test_every_resource_stays_within_its_bound(user: int | None, without: str) -> None:
    rows = measured(user, without, ())
    assert len(rows) >= 25
    assert over_their_bounds(rows, without) == {}


@pytest.mark.parametrize(("user", "without"), HOSTS)
def test_combinations_stay_within_their_bound(user: int | None, without: str) -> None:
    rows = measured(user, without, SEEDS)
    assert len(rows) == len(SEEDS)
    assert over_their_bounds(rows, without) == {}
