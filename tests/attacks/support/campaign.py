"""A whole attack on one server: regular clients, probes and attackers together, and the figures of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.attacks.support.attacker import Outcome
from tests.attacks.support.probe import HealthProbe, Level, MemoryProbe, control_server, percentile
from tests.attacks.support.regular import RegularClients, regular_work
from tests.attacks.support.servers import ROOT, RunningServer, running_server

__all__ = ["Figures", "run_campaign", "stored_seeds"]

STAGES = ("requests", "connections")
_MB = 2**20
_RECOVERY_S = 20.0
_TRIM_S = 5.0
_ALLOWED_GROWTH = 0.1
_ALLOWED_GROWTH_MB = 50
_ALLOWED_DESCRIPTORS = 8
"""Those that a server opens once, with the first request of a kind: a log, a cache, the pipe of a thread."""


@dataclass
class Figures:
    """What an attack showed."""

    server: str
    seed: int
    seconds: float = 0.0
    attacks: int = 0
    connections: int = 0
    results: dict[str, int] = field(default_factory=dict)
    health_s: dict[str, float] = field(default_factory=dict)
    own_health_s: dict[str, float] = field(default_factory=dict)
    """Without the time in which the server was ready to run and had no CPU."""
    control_s: dict[str, float] = field(default_factory=dict)
    memory_mb: dict[str, float] = field(default_factory=dict)
    """before, peak, after: as `MemoryProbe` counts it."""
    processes: dict[str, int] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=dict)
    regular: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Responses that are not acceptable."""
    health_failures: list[str] = field(default_factory=list)
    regular_problems: list[str] = field(default_factory=list)
    left_processes: list[str] = field(default_factory=list)
    log_errors: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    slow_health: list[tuple[float, list[str]]] = field(default_factory=list)
    """The slowest /health: seconds and the attacks that ran at that time."""

    @property
    def allowed_memory_mb(self) -> float:
        """After the attack, when the server is idle."""
        before = self.memory_mb["before"]
        return max(before * (1 + _ALLOWED_GROWTH), before + _ALLOWED_GROWTH_MB)

    @property
    def allowed_descriptors(self) -> int:
        """After the attack, when the server is idle."""
        return self.descriptors["before"] + _ALLOWED_DESCRIPTORS

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def stored_seeds() -> list[int]:
    """The seeds of tests/attacks/seeds.json, or the one in ATTACK_SEED."""
    if "ATTACK_SEED" in os.environ:
        return [int(os.environ["ATTACK_SEED"])]
    return json.loads((Path(__file__).parents[1] / "seeds.json").read_text())["requests"]


def run_campaign(name: str, seed: int, folder: Path) -> Figures:
    """Start the server, attack it while regular clients use it, stop it."""
    figures = Figures(name, seed)
    with running_server(name, folder) as server, control_server() as control:
        clients = RegularClients(server.url, regular_work(name))
        clients.record()
        memory = MemoryProbe(server)
        _record_level(figures, "before", _idle_level(memory))
        probes = [HealthProbe(server.url, server.process.pid), HealthProbe(*control), memory]
        began = time.monotonic()
        for part in (*probes, clients):
            part.start()
        try:
            outcomes = [outcome for stage in STAGES for outcome in _attack(server, seed, stage)]
        finally:
            for part in (clients, *probes):
                part.stop()
        figures.seconds = round(time.monotonic() - began, 1)
        _record_outcomes(figures, outcomes)
        _record_clients(figures, clients)
        health, idle = probes[0], probes[1]
        figures.health_s, figures.control_s = _latencies(health.seconds), _latencies(idle.seconds)
        figures.own_health_s = _latencies(health.own_seconds)
        figures.health_failures = health.failures
        figures.slow_health = _slow_health(health, outcomes)
        _wait_for_recovery(figures, memory)
        _stop(figures, server, memory)
    return figures


def _idle_level(memory: MemoryProbe) -> Level:
    """`memory.level()` when the number of processes does not change any more: servers start workers early.

    First wait until the server has returned the memory of the recorded requests, as it does after the attack.
    """
    time.sleep(_TRIM_S)
    level = memory.level()
    for _ in range(20):
        time.sleep(0.5)
        previous, level = level, memory.level()
        if level.processes == previous.processes:
            break
    return level


def _attack(server: RunningServer, seed: int, stage: str) -> Iterator[Outcome]:
    """Run the attacker's process; it generates everything before it sends anything."""
    module = "tests.attacks.support.attacker"
    command = [sys.executable, "-m", module, "--server", server.name, "--url", server.url, "--stage", stage]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "--seed", str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready"), f"the attacker did not start: {ready!r}"
        process.stdin.write("\n")
        process.stdin.flush()
        for line in process.stdout:
            yield Outcome(**json.loads(line))
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def _record_outcomes(figures: Figures, outcomes: list[Outcome]) -> None:
    figures.attacks, figures.connections = len(outcomes), sum(outcome.sent for outcome in outcomes)
    results = Counter(str(outcome.statuses[0]) if outcome.statuses else outcome.result for outcome in outcomes)
    figures.results = dict(sorted(results.items()))
    figures.problems = [f"{outcome.name[:200]}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    figures.slowest = sorted(((outcome.seconds, outcome.name[:100]) for outcome in outcomes), reverse=True)[:5]


def _record_clients(figures: Figures, clients: RegularClients) -> None:
    figures.regular = {"ok": clients.ok, "changed": clients.changed, "failed": clients.failed}
    figures.regular["slowest_s"] = round(clients.slowest_s, 2)
    figures.regular_problems = clients.problems


def _latencies(seconds: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(seconds, share), 4) for name, share in shares.items()} | {"count": len(seconds)}


def _slow_health(health: HealthProbe, outcomes: list[Outcome]) -> list[tuple[float, list[str]]]:
    samples = sorted(zip(health.own_seconds, health.began, strict=True), reverse=True)[:5]
    return [
        (
            round(seconds, 3),
            [
                outcome.name[:100]
                for outcome in outcomes
                if outcome.began < began + seconds and outcome.began + outcome.seconds > began
            ],
        )
        for seconds, began in samples
    ]


def _wait_for_recovery(figures: Figures, memory: MemoryProbe) -> None:
    """The level after the attack, as soon as all of it is back at the level before, or after some seconds."""
    deadline = time.monotonic() + _RECOVERY_S
    while True:
        level = memory.level()
        recovered = (
            _mb(level.memory) <= figures.allowed_memory_mb
            and level.processes <= figures.processes["before"]
            and level.descriptors <= figures.allowed_descriptors
        )
        if recovered or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    figures.memory_mb["peak"] = _mb(memory.peak)
    _record_level(figures, "after", level)


def _record_level(figures: Figures, when: str, level: Level) -> None:
    figures.memory_mb[when] = _mb(level.memory)
    figures.processes[when] = level.processes
    figures.descriptors[when] = level.descriptors


def _stop(figures: Figures, server: RunningServer, memory: MemoryProbe) -> None:
    code, seconds = server.stop()
    figures.stop = {"exit_code": code, "seconds": round(seconds, 2)}
    deadline = time.monotonic() + 5
    while memory.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    figures.left_processes = [f"{process.pid} {' '.join(process.cmdline())[:100]}" for process in memory.alive()]
    lines = server.log_text().splitlines()
    figures.log_errors = [line[:300] for line in lines if "Traceback" in line or " ERROR" in line or "failed" in line][
        :20
    ]


def _mb(count: int) -> float:
    return round(count / _MB, 1)
