"""The probe of the attack suite sees what an attack leaves behind: memory and open descriptors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.attacks.support.campaign import Figures
from tests.attacks.support.checks import check_figures
from tests.attacks.support.probe import MemoryProbe
from tests.attacks.support.servers import RunningServer

_MB = 1 << 20

# Executes each line that it receives, and answers with a line.
_PROCESS = """
import os, sys, time
held = []
def fork():
    if os.fork() == 0: time.sleep(600)
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""


class Process(RunningServer):
    def execute(self, code: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{code}\n".encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"\n"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    popen = subprocess.Popen([sys.executable, "-c", _PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = Process("test", popen, "", tmp_path / "log", tmp_path)
    process.execute("pass")
    try:
        yield process
    finally:
        for member in reversed(process.tree()):
            with contextlib.suppress(ProcessLookupError):
                member.kill()
        popen.communicate()


def test_memory_that_forks_share_counts_once_before_and_at_the_peak(process: Process) -> None:
    probe = MemoryProbe(process)
    process.execute("held.append(b'x' * (100 << 20))")
    before = probe.level()
    for _ in range(4):
        process.execute("fork()")
    probe._sample()
    after = probe.level()
    assert after.processes == before.processes + 4
    assert before.memory > 100 * _MB
    for memory in (probe.peak, after.memory):
        assert before.memory <= memory < before.memory + 50 * _MB
    process.execute("held.append(b'x' * (60 << 20))")
    probe._sample()
    assert probe.peak >= before.memory + 60 * _MB


def test_descriptors_of_all_processes_count(process: Process) -> None:
    probe = MemoryProbe(process)
    before = probe.level()
    process.execute("held.append([open(os.devnull) for _ in range(30)])")
    assert probe.level() == replace(before, descriptors=before.descriptors + 30, memory=probe.level().memory)
    process.execute("fork()")
    assert probe.level().descriptors == 2 * (before.descriptors + 30)


@pytest.mark.parametrize(("after", "fails"), [(108, False), (109, True)])
def test_descriptors_that_stay_open_are_a_failure(after: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"max": 0.1}
    monkeypatch.delenv("ATTACK_FIGURES", raising=False)
    figures = Figures(
        "test", 1, health_s=seconds, own_health_s=seconds, control_s=seconds,
        memory_mb={"before": 100, "peak": 200, "after": 100}, processes={"before": 1, "after": 1},
        descriptors={"before": 100, "after": after}, regular={"ok": 1}, stop={"exit_code": 0},
    )  # fmt: skip
    with pytest.raises(AssertionError, match="open descriptors") if fails else contextlib.nullcontext():
        check_figures(figures)
