"""One attack on a server: the bytes that are sent, in which steps, and which outcomes are acceptable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = [
    "HARMLESS",
    "OVERLOADED",
    "PROTOCOL",
    "REJECTED",
    "Attack",
    "HalfClose",
    "Pause",
    "Read",
    "Repeated",
    "Reset",
    "Send",
    "http_request",
]

# Classes of outcomes: a status class, "503", "closed" (no response, the connection was closed), "timeout" (no response
# in time), "abandoned" (the attack does not read a response).
REJECTED = frozenset({"4xx", "abandoned"})
HARMLESS = frozenset({"2xx", "4xx", "abandoned"})
PROTOCOL = frozenset({"2xx", "4xx", "closed", "abandoned"})
OVERLOADED = HARMLESS | {"503"}

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Repeated:
    """A body of `count` times `unit` between `head` and `tail`, which is never completely in memory."""

    head: bytes
    unit: bytes
    count: int
    tail: bytes

    def __len__(self) -> int:
        return len(self.head) + len(self.unit) * self.count + len(self.tail)

    def pieces(self) -> Iterator[bytes]:
        yield self.head
        per_piece = min(self.count, max(1, _PIECE_BYTES // len(self.unit)))
        piece = self.unit * per_piece
        for _ in range(self.count // per_piece if per_piece else 0):
            yield piece
        yield self.unit * (self.count % per_piece if per_piece else 0) + self.tail


@dataclass(frozen=True)
class Send:
    data: bytes | Repeated
    pause_s: float = 0.0
    """With a pause, the bytes are sent one at a time."""


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Read:
    """Read one response."""

    method: str = "GET"


@dataclass(frozen=True)
class HalfClose:
    """Shut down the sending side."""


@dataclass(frozen=True)
class Reset:
    """Close with RST instead of FIN."""


Step = Send | Pause | Read | HalfClose | Reset


@dataclass(frozen=True)
class Attack:
    name: str
    """Unique: `python -m tests.attacks.support.attacker --only NAME` sends this one."""
    steps: tuple[Step, ...] = field(repr=False)
    allowed: frozenset[str] = HARMLESS
    wait_s: float = 60.0
    """How long a response may take. A server that is working on other requests is slow, but never silent."""
    structured: bool = True
    """An error response has a JSON body in the dialect of the API."""
    count: int = 1
    """Connections that are opened at once and go through the steps together."""


def http_request(
    method: str, path: str, body: bytes | Repeated = b"", headers: dict[str, str] | None = None, host: str = "localhost"
) -> tuple[Send, ...]:
    """A request with correct framing. The values of `headers` replace the defaults; an empty value removes one."""
    own = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items() if value), "", ""]
    head = "\r\n".join(lines).encode("utf-8", "surrogateescape")
    if isinstance(body, Repeated):
        return (Send(head), Send(body))
    return (Send(head + body),)
