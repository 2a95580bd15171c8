"""Sessions: the open conversations of a gateway, each accessible only with its name and its secret."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterator

from verl.agent.gateway.session import Session
from verl.inference.serving.api_errors import ApiError

__all__ = ["Sessions"]

_MAX_NAME = 200


class Sessions:
    """The open sessions, by a keyed hash of (name, secret).

    The hash is the index: neither the response nor its time depends on whether a session of this name exists under
    another secret, and secrets are not stored.
    """

    def __init__(self, create: Callable[[str], Session] | None = None, max_sessions: int | None = None) -> None:
        """`create` makes the session of the first request that generates; without it, only `add` adds sessions."""
        self._create, self._max_sessions = create, max_sessions
        self._hash_key = secrets.token_bytes(32)
        self._open: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session, secret: str) -> None:
        self._open[self._index(session.name, secret)] = session

    def get(self, name: str, secret: str) -> Session:
        """Return an open session; ApiError 404 if there is none with this name and this secret."""
        session = self._open.get(self._index(name, secret))
        if session is None:
            raise ApiError(
                "there is no session with this name and this secret, or it has ended.", status=404, code="no_session"
            )
        session.last_used = time.monotonic()
        return session

    @contextlib.contextmanager
    def use(self, name: str, secret: str) -> Iterator[Session]:
        """The session for a request that generates; created if necessary, removed again if nothing was recorded."""
        index = self._index(name, secret)
        if self._create is None or index in self._open:
            session = self.get(name, secret)
            with session.under_way():
                yield session
            return
        self._check_new(name)
        session = self._open[index] = self._create(name)
        try:
            with session.under_way():
                yield session
        finally:
            if session.is_unused and self._open.get(index) is session:
                del self._open[index]

    async def close(self, session: Session) -> None:
        """End a session and its in-flight requests."""
        self._open = {index: each for index, each in self._open.items() if each is not session}
        await session.close()

    def idle(self, seconds: float) -> list[Session]:
        """Sessions without a request for this time."""
        before = time.monotonic() - seconds
        return [session for session in self._open.values() if session.last_used < before and not session.in_flight]

    def all(self) -> list[Session]:
        return list(self._open.values())

    def _check_new(self, name: str) -> None:
        if len(name) > _MAX_NAME:
            raise ApiError(f"the session name has {len(name)} characters; at most {_MAX_NAME} are allowed.")
        if self._max_sessions is not None and len(self._open) >= self._max_sessions:
            raise ApiError(
                f"{self._max_sessions} sessions are open (--max-sessions). Delete one, or try again later.",
                status=503,
                code="too_many_sessions",
            )

    def _index(self, name: str, secret: str) -> bytes:
        return hmac.digest(self._hash_key, f"{len(name)} {name}{secret}".encode(), "sha256")
