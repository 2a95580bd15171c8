"""A server's control interface: calls whose errors name the URL, what was asked and what it said."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx

from verl.workers.rollout.base import EngineDiedError

__all__ = ["ALIVE", "LOST", "Server", "ServerError", "ServerLostError"]

# What an interrupted connection raises; a request that was refused raises none of these.
LOST = (httpx.NetworkError, httpx.ProtocolError, httpx.ConnectTimeout, httpx.PoolTimeout)

# A server that is restarted, or a network that hangs, gets so long.
BACK_WITHIN_S = 120.0

_ANSWER_S = 60.0
_LOOK_EVERY_S = 1.0


# Options of a connection's socket. A machine that loses power says nothing: after 20 s of silence it is asked, every
# 5 s, whether it is there, and after 6 times without an answer the connection is lost.
_ASKING = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 50_000}
ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _ASKING.items() if hasattr(socket, name)),
]


class ServerError(RuntimeError):
    """A server answers, but not what was asked for."""


class ServerLostError(ServerError, EngineDiedError):
    """A server does not answer, or was started anew."""


class Server:
    """One URL. Every call opens a connection of its own: some servers close idle ones without a word."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._closed = threading.Event()
        transport = httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0), socket_options=ALIVE)
        self._http = httpx.Client(timeout=_ANSWER_S, transport=transport, trust_env=False)

    def get(self, path: str, **params: Any) -> Any:
        """The JSON that it answers."""
        return self._ask("GET", path, params=params)

    def post(self, path: str, body: Any = None, timeout_s: float = _ANSWER_S, **params: Any) -> Any:
        """The JSON that it answers; None where that is none."""
        return self._ask("POST", path, json=body, params=params, timeout=timeout_s)

    def knows(self, path: str) -> bool:
        """Whether there is something to GET."""
        try:
            return self._http.get(self.url + path).is_success
        except httpx.HTTPError as error:
            raise ServerLostError(f"rollout.server_urls: {self.url} does not answer: {_said(error)}.") from error

    def wait_until_back(self) -> None:
        """Return when it answers again; ServerLostError when it does not for two minutes."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while True:
            try:
                if self.knows("/health"):
                    return
                trouble = "it says that it is not well"
            except ServerLostError as error:
                trouble = _said(error.__cause__ or error)
            if time.monotonic() > deadline or self._closed.wait(_LOOK_EVERY_S):
                raise ServerLostError(
                    f"rollout.server_urls: {self.url} has not answered for {BACK_WITHIN_S:.0f} s: {trouble}. Look into"
                    " its log."
                )

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._closed.set()
        self._http.close()

    def _ask(self, method: str, path: str, **how: Any) -> Any:
        try:
            reply = self._http.request(method, self.url + path, **how)
        except httpx.HTTPError as error:
            raise ServerLostError(f"rollout.server_urls: {self.url}{path} does not answer: {_said(error)}.") from error
        if not reply.is_success:
            raise ServerError(
                f"rollout.server_urls: {self.url}{path} answered {reply.status_code}: {reply.text.strip()[:2000]}"
            )
        try:
            return reply.json()
        except ValueError:
            return None


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
