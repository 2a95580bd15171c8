"""A retriever in its own process, started by its command line, and a small corpus."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


def write_corpus(path: Path, texts: Mapping[str, str]) -> Path:
    """Write titles and texts as a corpus file; return its path."""
    lines = (
        json.dumps({"id": str(n), "contents": f'"{title}"\n{text}'}) for n, (title, text) in enumerate(texts.items())
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process and its address; it can be started again after `kill`."""

    def __init__(self, corpus: Path, *options: str) -> None:
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.base}/retrieve"
        self._command = [sys.executable, "-m", "verl.search.server", "--corpus_path", str(corpus), *options]
        self._cache = corpus.parent / "cache"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "VERL_CACHE": str(self._cache)}
        self.process = subprocess.Popen([*self._command, "--port", str(self.port)], env=env)
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.base}/health", trust_env=False).status_code == 200:
                    return
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            time.sleep(0.1)
        raise AssertionError("the server was not ready within a minute")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def serving(corpus: Path, *options: str) -> Iterator[Server]:
    """Run a server that is ready for requests until the block ends."""
    server = Server(corpus, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
