"""The servers under attack, each started as a process of its own the way users start it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.attacks.support.keys import API_KEY
from tests.support.search_server import write_corpus

__all__ = ["SERVERS", "RunningServer", "running_server"]

ROOT = Path(__file__).parents[3]
SERVERS = ("sandbox", "search", "inference", "gateway")
MAX_MODEL_LEN = 256
_START_S = 120.0
_STOP_S = 20.0
_COLOURS = ("green", "red", "yellow", "brown", "blue", "white")
_FRUITS = ("apple", "pear", "plum", "grape", "fig", "melon", "peach", "lime")


@dataclass
class RunningServer:
    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    files: Path
    """What the server writes besides its log."""

    def tree(self) -> list[psutil.Process]:
        """The server's process and all descendants."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> tuple[int | None, float]:
        """Send SIGTERM; return (exit code, seconds). None: it did not stop within its grace period and was killed."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return None, time.monotonic() - began
        return code, time.monotonic() - began


@contextlib.contextmanager
def running_server(name: str, folder: Path) -> Iterator[RunningServer]:
    """A server that accepts requests; it is killed at the end if it still runs."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VERL_API_KEY": API_KEY,
        "VERL_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if name == "gateway":
        del environment["VERL_API_KEY"]  # agents authenticate with the secret of their conversation
    command = [sys.executable, "-m", *_command(name, folder), "--port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment, cwd=folder)
    server = RunningServer(name, process, "", log, folder)
    descendants: list[psutil.Process] = []
    try:
        server.url = _wait_for_address(server)
        yield server
        descendants = server.tree()
    finally:
        process.kill()
        process.wait()
        for left in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def _wait_for_address(server: RunningServer) -> str:
    deadline = time.monotonic() + _START_S
    while not (match := re.search(r"serving .* at (http://127\.0\.0\.1:\d+)", server.log_text())):
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the {server.name} server did not start:\n{server.log_text()[-2000:]}")
        time.sleep(0.1)
    return match[1]


def _command(name: str, folder: Path) -> list[str]:
    if name == "sandbox":
        from verl.sandbox import REQUIRE, available

        level = min(("files", available().level), key=REQUIRE.index)
        return ["verl.sandbox.server", f"--require={level}", "--max-seconds=60", "--max-memory-mb=1024"]
    if name == "search":
        return ["verl.search.server", "--corpus_path", str(_corpus(folder))]
    model = ["--model", str(_model(folder)), "--device", "cpu", "--max-num-seqs", "16", "--served-model-name", "tiny"]
    model += ["--max-model-len", str(MAX_MODEL_LEN)]
    if name == "inference":
        return ["verl.inference.server", *model, "--allow-client-templates", "--max-parse-seconds", "2"]
    assert name == "gateway"
    return ["verl.agent.gateway", *model, "--out", str(folder / "sessions.jsonl")]


def _corpus(folder: Path) -> Path:
    titles = [f"{colour} {fruit} {number}" for colour in _COLOURS for fruit in _FRUITS for number in range(20)]
    texts = {title: f"{title} grows in garden {place % 7}, row {place}." for place, title in enumerate(titles)}
    return write_corpus(folder / "corpus.jsonl", texts)


def _model(folder: Path) -> Path:
    from tests.support.tiny import save_tiny_model

    path = folder / "tiny"
    if not path.exists():
        save_tiny_model(path)
    return path
