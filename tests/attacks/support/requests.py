"""Generator of malicious HTTP requests to an endpoint: deterministic, from the description of a valid request."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.attacks.support.attack import (
    HARMLESS,
    OVERLOADED,
    PROTOCOL,
    REJECTED,
    Attack,
    Read,
    Repeated,
    http_request,
)
from tests.attacks.support.values import DEEP, NOT_A_NUMBER, NUMBERS, REJECTED_TEXTS, TEXTS, TYPES, large_values

__all__ = [
    "Endpoint",
    "authentication_attacks",
    "body_attacks",
    "body_with",
    "field_attacks",
    "header_attacks",
    "large_attacks",
    "post",
    "random_attacks",
]

_MARK = "@@attack-{}@@"
_LARGE_BYTES = 4 << 20
_TOO_LARGE_HEADERS = ("long-value", "1-MB-value", "long-name", "10000-headers")
_ABOVE_LIMIT_BYTES = 60 << 20


@dataclass(frozen=True)
class Endpoint:
    """Where requests go to, and what a valid one looks like."""

    path: str
    valid: Mapping[str, Any]
    numbers: tuple[str, ...] = ()
    """Numeric fields; dots separate levels, numbers are places in lists."""
    texts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Lists, objects and booleans."""
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per numeric field: names in NUMBERS that must be rejected there."""
    max_body: int = 8 << 20
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.numbers, *self.texts, *self.others)))


def post(
    endpoint: Endpoint,
    name: str,
    body: bytes | Repeated,
    allowed: frozenset[str] = HARMLESS,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> Attack:
    own = {**endpoint.headers, **(headers or {})}
    steps = http_request(endpoint.method, endpoint.path, body, own)
    return Attack(f"{endpoint.path} {name}", (*steps, Read(endpoint.method)), allowed, **options)


def field_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """Every malicious value in every field."""
    for name in endpoint.numbers:
        for kind, value in NOT_A_NUMBER.items():
            yield post(endpoint, f"number {name}={kind}", body_with(endpoint.valid, {name: value}), REJECTED)
        for kind, value in NUMBERS.items():
            allowed = REJECTED if kind in endpoint.rejected.get(name, ()) else HARMLESS
            yield post(endpoint, f"number {name}={kind}", body_with(endpoint.valid, {name: value}), allowed)
    for name in endpoint.texts:
        for kind, value in REJECTED_TEXTS.items():
            yield post(endpoint, f"text {name}={kind}", body_with(endpoint.valid, {name: value}), REJECTED)
        for kind, value in {**TEXTS, **TYPES}.items():
            yield post(endpoint, f"text {name}={kind}", body_with(endpoint.valid, {name: value}))
    for name in endpoint.others:
        for kind, value in {**TYPES, **TEXTS}.items():
            yield post(endpoint, f"type {name}={kind}", body_with(endpoint.valid, {name: value}))
    for name in dict.fromkeys((*endpoint.texts, *endpoint.others)):
        for kind, value in DEEP.items():
            allowed = HARMLESS if kind == "lists-900" else REJECTED
            yield post(endpoint, f"deep {name}={kind}", body_with(endpoint.valid, {name: value}), allowed)


def large_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """4 MB of every kind in a text and in another field, of some kinds in the rest; bodies at and above the limit."""
    within = large_values(min(_LARGE_BYTES, endpoint.max_body // 2))
    limit = large_values(endpoint.max_body - 4096)
    kinds = sorted(within)
    main = {*endpoint.texts[:1], *endpoint.others[:1]}
    for number, name in enumerate(dict.fromkeys((*endpoint.texts, *endpoint.others))):
        for kind in kinds if name in main else kinds[number % 4 :: 4]:
            yield post(endpoint, f"large {name}={kind}", body_with(endpoint.valid, {name: within[kind]}), OVERLOADED)
        for kind in ("text", "words", "list-of-texts", "list-of-messages") if name in main else ():
            yield post(endpoint, f"limit {name}={kind}", body_with(endpoint.valid, {name: limit[kind]}), OVERLOADED)
    if endpoint.texts:
        value = large_values(max(_ABOVE_LIMIT_BYTES, 2 * endpoint.max_body))["text"]
        body = body_with(endpoint.valid, {endpoint.texts[0]: value})
        yield post(endpoint, "above-limit", body, REJECTED | {"503"})
        expecting = {"Expect": "100-continue"}
        yield post(endpoint, "above-limit-expect", body, REJECTED | {"503", "closed"}, expecting)


def body_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """Bodies that are not a valid JSON object, and wrong headers of bodies."""
    valid = json.dumps(endpoint.valid).encode()
    bodies: dict[str, bytes] = {
        "empty": b"",
        "space": b" ",
        "null": b"null",
        "number": b"1",
        "text": b'"x"',
        "list": b"[]",
        "list-of-request": b"[" + valid + b"]",
        "unterminated": valid[:-1],
        "trailing-bytes": valid + b"x",
        "two-bodies": valid + valid,
        "bom": b"\xef\xbb\xbf" + valid,
        "utf-16": valid.decode().encode("utf-16"),
        "utf-32": valid.decode().encode("utf-32"),
        "nul-bytes": b"\0" * 100,
        "latin-1": b'{"\xe9": 1}',
        "single-quotes": b"{'a': 1}",
        "comment": b"/* */ {}",
        "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
        "form": b"code=1&x=2",
        "xml-entities": b'<!DOCTYPE a [<!ENTITY a "x">]><a>&a;</a>',
        "surrogate-key": b'{"\\udc00": 1}',
        **{f"deep-{kind}": value for kind, value in DEEP.items()},
    }
    for kind, body in bodies.items():
        yield post(endpoint, f"body {kind}", body, REJECTED)
    yield post(endpoint, "body duplicate-keys", valid[:-1] + b", " + valid[1:])
    unknown = {f"unknown-{number}": 1 for number in range(5_000)}
    yield post(endpoint, "body 5000-unknown-fields", json.dumps({**endpoint.valid, **unknown}).encode())
    for kind in ("__class__", "__proto__", "constructor", "model_config", "self", "k" * 100_000, "\ud7ff", "", "a.b"):
        yield post(endpoint, f"body key={kind[:20]!r}", json.dumps({**endpoint.valid, kind: {"a": 1}}).encode())
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp"):
        headers = {"Content-Type": kind}
        yield post(endpoint, f"content-type {kind!r}", valid, REJECTED, headers)
    for kind in ("application/json; charset=utf-7", "APPLICATION/JSON", "application/json" + ";a=b" * 500):
        yield post(endpoint, f"content-type {kind[:40]!r}", valid, HARMLESS, {"Content-Type": kind})
    yield post(endpoint, "content-encoding", b"\x1f\x8b\x08\0" * 100, REJECTED, {"Content-Encoding": "gzip"})


def header_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """Long, many, odd and duplicated headers; long and odd URLs. What is not HTTP may close the connection."""
    valid = json.dumps(endpoint.valid).encode()
    headers: dict[str, Mapping[str, str]] = {
        "long-value": {"X-Long": "x" * 100_000},
        "1-MB-value": {"X-Long": "x" * (1 << 20)},
        "long-name": {"X" * 100_000: "1"},
        "10000-headers": {f"X-{number}": "1" for number in range(10_000)},
        "nul": {"X-Nul": "a\0b"},
        "surrogates": {"X-Raw": "\udcff\udcfe"},
        "empty-name": {" ": "x"},
        "name-with-space": {"X Y": "1"},
        "folded": {"X-Folded": "a\r\n b"},
        "bare-lf": {"X-Lf": "a\nX-Other: b"},
        "host-traversal": {"Host": "../../etc"},
        "no-host": {"Host": ""},
        "cookie": {"Cookie": "a=b; " * 2_000},
        "range": {"Range": "bytes=0-,0-,0-" + ",0-" * 1_000},
        "forwarded": {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "\x7f", "Forwarded": "for=_x"},
        "upgrade-h2c": {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"},
        "upgrade-websocket": {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(b"0" * 16).decode(),
        },
        "accept": {"Accept": "*/*;q=" + "9" * 5_000, "Accept-Encoding": "x," * 3_000},
        "expect-other": {"Expect": "200-ok"},
        "expect-100": {"Expect": "100-continue"},
        "connection-close": {"Connection": "close"},
    }
    for kind, extra in headers.items():
        allowed = REJECTED | {"closed"} if kind in _TOO_LARGE_HEADERS else PROTOCOL
        yield post(endpoint, f"header {kind}", valid, allowed, extra, structured=False)
    paths = {
        "100-KB": endpoint.path + "x" * 100_000,
        "query-12-KB": f"{endpoint.path}?{'a=b&' * 3_000}",
        "query-100-KB": f"{endpoint.path}?{'a=b&' * 25_000}",
        "traversal": "/../../etc/passwd",
        "encoded-traversal": "/%2e%2e/%2e%2e/etc/passwd",
        "double-slash": f"/{endpoint.path}",
        "nul": f"{endpoint.path}%00",
        "invalid-percent": f"{endpoint.path}%zz%",
        "invalid-utf8": f"{endpoint.path}/%ff%fe",
        "semicolon": f"{endpoint.path};a=b",
        "absolute-form": f"http://other.example{endpoint.path}",
        "authority-form": "other.example:443",
        "star": "*",
        "fragment": f"{endpoint.path}#x",
        "raw-bytes": f"{endpoint.path}/\udcff",
        "many-slashes": "/" * 8_000,
        "docs": "/openapi.json",
        "dot-git": "/.git/config",
    }
    for kind, path in paths.items():
        own = Endpoint(path, endpoint.valid, headers=endpoint.headers, max_body=endpoint.max_body)
        attack = post(own, "", valid, PROTOCOL, structured=False)
        yield Attack(f"{endpoint.path} path {kind}", attack.steps, attack.allowed, structured=False)
    for method in (
        "GET",
        "HEAD",
        "OPTIONS",
        "TRACE",
        "PUT",
        "PATCH",
        "DELETE",
        "CONNECT",
        "PROPFIND",
        "get",
        "X" * 999,
    ):
        steps = http_request(method, endpoint.path, b"", dict(endpoint.headers))
        yield Attack(f"{endpoint.path} method {method[:20]}", (*steps, Read(method)), PROTOCOL, structured=False)


def authentication_attacks(
    endpoint: Endpoint, names: tuple[str, ...] = ("Authorization", "X-Api-Key")
) -> Iterator[Attack]:
    """Missing, wrong, long and malformed keys: 401 (or 4xx where the header itself is not HTTP)."""
    valid = json.dumps(endpoint.valid).encode()
    without = {name: "" for name in names}
    yield post(endpoint, "key missing", valid, REJECTED, without)
    keys = {
        "wrong": "wrong",
        "one-character": "a",
        "prefix": "attack-ke",
        "long": "k" * 10_000,
        "non-ascii": "\u00e9\u4e2d",
        "raw-bytes": "\udcff\udcfe",
        "null": "null",
        "comma": "attack-key,attack-key",
        "quoted": '"attack-key"',
        "upper": "ATTACK-KEY",
    }
    for kind, key in keys.items():
        yield post(endpoint, f"key bearer-{kind}", valid, REJECTED, {**without, "Authorization": f"Bearer {key}"})
        yield post(endpoint, f"key x-api-key-{kind}", valid, REJECTED, {**without, "X-Api-Key": key})
        encoded = base64.b64encode(f"user:{key}".encode("utf-8", "surrogateescape")).decode()
        yield post(endpoint, f"key basic-{kind}", valid, REJECTED, {**without, "Authorization": f"Basic {encoded}"})
    for kind, value in {
        "basic-no-base64": "Basic ???",
        "digest": "Digest x",
        "bare": "attack-key",
        "bearer": "Bearer",
    }.items():
        yield post(endpoint, f"key {kind}", valid, REJECTED, {**without, "Authorization": value})


def random_attacks(endpoint: Endpoint, rng: random.Random, count: int) -> Iterator[Attack]:
    """Combinations of malicious values in several fields at once."""
    tables = {**NOT_A_NUMBER, **NUMBERS, **TYPES, **TEXTS, **REJECTED_TEXTS, **DEEP}
    kinds = sorted(tables)
    for number in range(count):
        chosen = rng.sample(endpoint.fields, min(len(endpoint.fields), rng.randint(2, 6)))
        picks = {name: rng.choice(kinds) for name in chosen}
        body = body_with(endpoint.valid, {name: tables[kind] for name, kind in picks.items()})
        yield post(endpoint, f"random {number} {json.dumps(picks, sort_keys=True)}", body)


def body_with(valid: Mapping[str, Any], values: Mapping[str, bytes | Repeated]) -> bytes | Repeated:
    """The valid request with JSON text in the place of some fields; at most one of the values is Repeated."""
    content = copy.deepcopy(dict(valid))
    for number, name in enumerate(values):
        _place(content, name.split("."), _MARK.format(number))
    body = json.dumps(content).encode()
    large: tuple[bytes, Repeated] | None = None
    for number, value in enumerate(values.values()):
        mark = json.dumps(_MARK.format(number)).encode()
        if isinstance(value, Repeated):
            large = (mark, value)
        else:
            body = body.replace(mark, value)
    if large is None:
        return body
    mark, value = large
    head, _, tail = body.partition(mark)
    return Repeated(head + value.head, value.unit, value.count, value.tail + tail)


def _place(content: Any, keys: list[str], value: str) -> None:
    first, *rest = keys
    key: Any = int(first) if isinstance(content, list) else first
    if not rest:
        content[key] = value
        return
    if not isinstance(content, list) and not isinstance(content.get(key), dict | list):
        content[key] = {}  # another of the values replaced the parent
    _place(content[key], rest, value)
