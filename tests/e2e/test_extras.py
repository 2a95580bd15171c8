"""`pip install -e .[test,<engine>]` resolves to compatible versions (dry run)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pip(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("extra", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("megatron", "megatron-core")])
def test_an_engines_extra_resolves_beside_the_tests(extra, engine, tmp_path):
    report = tmp_path / "report.json"
    if pip("index", "versions", engine, "--timeout", "10", "--retries", "0", seconds=120).returncode:
        pytest.skip(f"no package index here has {engine}")
    found = pip("install", "--dry-run", "--report", str(report), "-e", f".[test,{extra}]", seconds=1700)
    assert found.returncode == 0, found.stderr[-3000:]
    chosen = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    assert engine in chosen or pip("show", engine, seconds=60).returncode == 0
