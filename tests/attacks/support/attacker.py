"""Sends the attacks on one server from a process with low priority; one JSON line per attack.

    python -m tests.attacks.support.attacker --server sandbox --url http://127.0.0.1:8080 --seed 32 [--only NAME]

All payloads are generated before "ready" is printed; a line on stdin starts the attack (not with --only).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import random
import re
import resource
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from tests.attacks.support.attack import Attack, HalfClose, Pause, Read, Repeated, Reset, Send
from tests.attacks.support.surfaces import SURFACES

__all__ = ["Outcome", "main", "run_attack"]

_SERVER_CODE = str(Path(__file__).parents[3] / "verl")
_LINGER = struct.pack("ii", 1, 0)
_OPEN_FILES = 8_192
_SHOWN = 300
_ABSOLUTE_PATH = re.compile(r"(?<![\w:./-])/(?:[\w.+-]+/)+[\w.+-]+")
_TRACES = ("Traceback (most recent call last)", 'File "/', "site-packages")


@dataclass
class Outcome:
    """What an attack resulted in. `result` is the class of its worst response; `problem` is empty if it is allowed."""

    name: str
    result: str = "abandoned"
    statuses: list[int] = field(default_factory=list)
    began: float = 0.0
    """On the clock of time.monotonic, which all processes of a machine share."""
    seconds: float = 0.0
    problem: str = ""
    sent: int = 0
    """Requests or connections."""


def run_attack(attack: Attack, address: tuple[str, int]) -> Outcome:
    """Open the attack's connections, go through its steps and classify the responses."""
    outcome = Outcome(attack.name, sent=attack.count, began=time.monotonic())
    connections = [_Connection(attack, address) for _ in range(attack.count)]
    try:
        for step in attack.steps:
            _apply(step, connections)
    finally:
        for connection in connections:
            connection.close()
    results = [result for connection in connections for result in connection.results] or ["abandoned"]
    outcome.result = next((result for result in results if result not in attack.allowed), results[0])
    outcome.statuses = [status for connection in connections for status in connection.statuses][:10]
    outcome.seconds = round(time.monotonic() - outcome.began, 3)
    problems = [problem for connection in connections for problem in connection.problems]
    if outcome.result not in attack.allowed:
        shown = next((connection.shown for connection in connections if connection.shown), "")
        problems.insert(0, f"{outcome.result} is not one of {sorted(attack.allowed)}: {shown}")
    outcome.problem = "; ".join(problems)[: 4 * _SHOWN]
    return outcome


def _apply(step: object, connections: Sequence[_Connection]) -> None:
    if isinstance(step, Pause):
        time.sleep(step.seconds)
    elif isinstance(step, Send) and step.pause_s:
        assert isinstance(step.data, bytes)
        for byte in step.data:
            for connection in connections:
                connection.send(bytes([byte]))
            time.sleep(step.pause_s)
    else:
        for connection in connections:
            connection.apply(step)


class _Connection:
    """One connection of an attack. After an error of the connection the remaining steps have no effect."""

    def __init__(self, attack: Attack, address: tuple[str, int]) -> None:
        self._attack, self._failed = attack, False
        self.results: list[str] = []
        self.statuses: list[int] = []
        self.problems: list[str] = []
        self.shown = ""
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.create_connection(address, timeout=attack.wait_s)
            self._file = _OpenFile(self._socket.makefile("rb"))
        except TimeoutError:
            self.results.append("timeout")
            self._failed = True
        except OSError:
            self.results.append("closed")
            self._failed = True

    def apply(self, step: object) -> None:
        if isinstance(step, Send):
            self.send(step.data)
        elif isinstance(step, Read):
            self._read(step.method)
        elif isinstance(step, HalfClose) and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        elif isinstance(step, Reset) and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            self.close()

    def send(self, data: bytes | Repeated) -> None:
        if self._failed or self._socket is None:
            return
        try:
            for piece in data.pieces() if isinstance(data, Repeated) else (data,):
                self._socket.sendall(piece)
        except OSError:  # the server does not want more; its response may be there
            self._failed = True

    def _read(self, method: str) -> None:
        if self._socket is None or (self.results and self.results[-1] in ("closed", "timeout")):
            return
        response = http.client.HTTPResponse(self._file, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            body = response.read()
        except TimeoutError:
            self.results.append("timeout")
            return
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.results.append("closed")
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
                self.problems.append(f"the response is not HTTP: {error!r}")
            return
        self.statuses.append(response.status)
        status = "503" if response.status == 503 else f"{response.status // 100}xx"
        self.results.append(status)
        self.problems += self._problems(response, body, method)

    def _problems(self, response: http.client.HTTPResponse, body: bytes, method: str) -> Iterator[str]:
        text = body.decode(errors="replace")
        if _SERVER_CODE in text:
            place = text.index(_SERVER_CODE)
            yield f"the response contains paths of the server's code: {text[max(0, place - 50) : place + 150]}"
        if response.status < 400:
            return
        self.shown = self.shown or f"{response.status} {text[:_SHOWN]}"
        for trace in _TRACES:
            if trace in text:
                yield f"the response contains {trace!r}: {text[:_SHOWN]}"
        for path in _leaked_paths(text, self._attack):
            yield f"the response contains the host path {path}"
        if self._attack.structured and method != "HEAD" and not _is_error_json(text):
            yield f"the response is not an error of this API: {text[:_SHOWN]}"

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._file.really_close()
            self._socket.close()
            self._socket = None


class _OpenFile:
    """The receiving side of a connection, which stays open after a response."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def makefile(self, _mode: str) -> _OpenFile:
        return self

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def close(self) -> None:
        pass

    def really_close(self) -> None:
        self._file.close()


def _leaked_paths(text: str, attack: Attack) -> Iterator[str]:
    """Absolute paths below directories of this machine that the client did not send."""
    for match in set(_ABSOLUTE_PATH.findall(text)):
        path = match.rstrip(".")
        if os.path.isdir("/" + path.split("/")[1]) and not _was_sent(path, attack):
            yield path


def _was_sent(path: str, attack: Attack) -> bool:
    for step in attack.steps:
        if isinstance(step, Send):
            data = step.data if isinstance(step.data, bytes) else step.data.head + step.data.unit * 2 + step.data.tail
            if path.encode() in data or path.encode() in unquote_to_bytes(data):
                return True
    return False


def _is_error_json(text: str) -> bool:
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and bool({"detail", "error"} & content.keys())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--server", required=True, choices=sorted(SURFACES))
    parser.add_argument("--url", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stage", choices=("requests", "connections"), default="requests")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--only", help="send the attacks whose name contains this text, and print all of them")
    options = parser.parse_args(arguments)
    os.nice(10)
    _allow_open_files()
    surface = SURFACES[options.server]
    attacks = list(surface.requests(options.seed) if options.stage == "requests" else surface.connections())
    assert len({attack.name for attack in attacks}) == len(attacks), "names of attacks must be unique"
    random.Random(options.seed).shuffle(attacks)
    if options.only is not None:
        attacks = [attack for attack in attacks if options.only in attack.name]
    else:
        sys.stdout.write(f"ready {len(attacks)}\n")
        sys.stdout.flush()
        sys.stdin.readline()
    parts = urlsplit(options.url)
    _send_all(attacks, (str(parts.hostname), int(parts.port or 80)), options.threads)
    return 0


def _send_all(attacks: Sequence[Attack], address: tuple[str, int], threads: int) -> None:
    waiting, lock = deque(attacks), threading.Lock()

    def work() -> None:
        while True:
            try:
                attack = waiting.popleft()
            except IndexError:
                return
            line = json.dumps(asdict(run_attack(attack, address)))
            with lock:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


if __name__ == "__main__":
    sys.exit(main())
