"""Attacks on the sandbox server."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator

from tests.attacks.support import protocol, requests
from tests.attacks.support.attack import HARMLESS, OVERLOADED, REJECTED, Attack, Pause, Repeated, Reset, http_request
from tests.attacks.support.keys import API_KEY, bearer
from tests.attacks.support.programs import FETCHED, PROGRAMS, SLEEPING
from tests.attacks.support.values import FILE_NAMES

__all__ = ["connections", "malicious_requests"]

_SECONDS = 1.0
ENDPOINT = requests.Endpoint(
    "/run_code",
    {"code": "print(1)", "language": "python", "run_timeout": _SECONDS, "files": {}},
    numbers=("run_timeout", "compile_timeout", "memory_limit_MB"),
    texts=("code", "language", "stdin", "files.x"),
    others=("files", "fetch_files"),
    rejected={
        "run_timeout": ("0", "minus-0", "minus-1", "1e38", "1e308", "2**31", "2**63", "minus-2**63"),
        "compile_timeout": ("0", "minus-1", "1e308", "2**63", "2**64-1"),
        "memory_limit_MB": ("0", "1.5", "1e-40", "1e308", "2**31", "2**63", "2**64-1", "minus-2**63"),
    },
    max_body=32 << 20,
    headers=bearer(API_KEY),
)
_CONTENT = base64.b64encode(b"x").decode()


def malicious_requests(seed: int) -> Iterator[Attack]:
    for generate in (
        requests.field_attacks,
        requests.large_attacks,
        requests.body_attacks,
        requests.header_attacks,
        requests.authentication_attacks,
        protocol.framing_attacks,
    ):
        yield from generate(ENDPOINT)
    yield from requests.random_attacks(ENDPOINT, random.Random(seed), 60)
    yield from _file_names()
    yield from _many_files()
    yield from _programs()


def connections() -> Iterator[Attack]:
    yield from protocol.slow_attacks(ENDPOINT)
    yield from protocol.flood_attacks(ENDPOINT)


def _run(name: str, allowed: frozenset[str] = HARMLESS, **fields: object) -> Attack:
    return requests.post(ENDPOINT, name, json.dumps({**ENDPOINT.valid, **fields}).encode(), allowed)


def _file_names() -> Iterator[Attack]:
    outside = ("dot-dot", "parent", "deep-parent", "many-parents", "absolute", "double-slash", "proc", "self-root")
    impossible = ("empty", "dot", "nul", "10-KB", "300-bytes", "device", "trailing-slash", "file-below-file")
    for kind, name in FILE_NAMES.items():
        allowed = REJECTED if kind in outside + impossible else HARMLESS
        yield _run(f"file-name {kind}", allowed, files={name: _CONTENT})
        yield _run(f"fetch-name {kind}", allowed if kind in outside else HARMLESS, fetch_files=[name])
    for kind, name in {"surrogate": "\ud800", "surrogate-pair-half": "a\udc00b"}.items():
        yield _run(f"file-name {kind}", REJECTED, files={name: _CONTENT})
        yield _run(f"fetch-name {kind}", REJECTED, fetch_files=[name])
    yield _run("file-name file-and-directory", files={"a": _CONTENT, "a/b": _CONTENT})
    yield _run("file-name same-file-twice", files={"a": _CONTENT, "./a": _CONTENT, "b/../a": _CONTENT})


def _many_files() -> Iterator[Attack]:
    head = json.dumps(ENDPOINT.valid).encode()[:-1]
    million = Repeated(head + b', "fetch_files": [', b'"x",', 1_000_000, b'"x"]}')
    yield requests.post(ENDPOINT, "fetch-files million", million, REJECTED)
    contents = b"".join(b'"f%06d": "",' % number for number in range(10_000))
    files = Repeated(b'{"code": "", "files": {', contents, 20, b'"x": ""}}')
    yield requests.post(ENDPOINT, "files 200000-names", files, OVERLOADED)
    yield _run("files 1024-directories", files={"d/" * 15 + f"f{number}": _CONTENT for number in range(1024)})
    large = Repeated(b'{"code": "print(1)", "files": {"x": "', b"AAAA", 7 << 20, b'"}}')
    yield requests.post(ENDPOINT, "files 28-MB", large, OVERLOADED)
    stdin = Repeated(b'{"code": "print(1)", "stdin": "', b"x", 28 << 20, b'"}')
    yield requests.post(ENDPOINT, "stdin 28-MB", stdin, OVERLOADED)


def _programs() -> Iterator[Attack]:
    for kind, code in PROGRAMS.items():
        yield _run(f"program {kind}", code=code, memory_limit_MB=256)
    for kind, code in FETCHED.items():
        yield _run(f"fetched {kind}", code=code, fetch_files=["x"], memory_limit_MB=256)
    yield _run("fetched large-file-1000-times", code=FETCHED["large-file"], fetch_files=["x"] * 1000)
    for language in ("bash", "cpp", "nodejs", "go", "rust", "java", "../python", "python\0", "PYTHON", "python "):
        yield _run(f"language {language!r}", code="x", language=language)
    body = json.dumps({"code": SLEEPING, "run_timeout": 60}).encode()
    steps = http_request("POST", ENDPOINT.path, body, dict(ENDPOINT.headers))
    for number in range(5):
        yield Attack(f"/run_code disconnect {number}", (*steps, Pause(0.5), Reset()), count=8)
