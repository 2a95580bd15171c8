"""SandboxClient: code run on a SandboxFusion server, with the call of a local sandbox."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from verl.sandbox.fusion_api import DEFAULT_SECONDS, PING, RUN, ServerFailed, result_from_json, run_request
from verl.sandbox.outcome import Limits, Result
from verl.utils.network import api_headers

# Worth another attempt: the server is starting, restarting or busy.
_BUSY = (429, 500, 502, 503, 504)
_LOST = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
_LONGEST_PAUSE = 30.0


class SandboxUnavailable(RuntimeError):
    """The server did not run the code, in so many attempts."""


class SandboxClient:
    """Runs code on the server at `url` (`http://host:8080`, with or without `/run_code`).

    Connection errors, 5xx and 429 are tried again, `attempts` times in all, after pauses that double from `pause_s` and
    vary, so that clients do not come back together. At most `max_concurrent` requests are under way at once; a request
    may wait `queue_s` seconds in the server beyond its own time. `run` and `run_async` may be used from any thread and
    event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int = 64,
        memory_mb: int | None = None,
        attempts: int = 4,
        pause_s: float = 0.5,
        queue_s: float = 120.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix(RUN)
        self._memory_mb, self._attempts, self._pause_s, self._queue_s = memory_mb, attempts, pause_s, queue_s
        self._most = max_concurrent
        self._free = threading.BoundedSemaphore(max_concurrent)
        self._client: httpx.Client | None = None
        # A connection belongs to the event loop that opened it.
        self._of_loop: WeakKeyDictionary[Any, tuple[httpx.AsyncClient, asyncio.Semaphore]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Result:
        """Run a program; a SandboxUnavailable where no server did, a ValueError where it refused the request."""
        request, timeout = self._request(code, language, stdin, files, fetch, limits)
        with self._lock:
            self._client = self._client or httpx.Client(trust_env=False, headers=api_headers())
        with self._free:
            for attempt in range(1, self._attempts + 1):
                answer: httpx.Response | Exception
                try:
                    answer = self._client.post(f"{self.url}{RUN}", json=request, timeout=timeout)
                except httpx.HTTPError as error:
                    answer = error
                if (done := self._done(answer, attempt)) is not None:
                    return done
                time.sleep(self._pause(answer, attempt))
        raise AssertionError("the last attempt returns or raises")

    async def run_async(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Result:
        """As `run`, in an event loop."""
        request, timeout = self._request(code, language, stdin, files, fetch, limits)
        client, free = self._in_this_loop()
        async with free:
            for attempt in range(1, self._attempts + 1):
                answer: httpx.Response | Exception
                try:
                    answer = await client.post(f"{self.url}{RUN}", json=request, timeout=timeout)
                except httpx.HTTPError as error:
                    answer = error
                if (done := self._done(answer, attempt)) is not None:
                    return done
                await asyncio.sleep(self._pause(answer, attempt))
        raise AssertionError("the last attempt returns or raises")

    def problem(self, within_s: float = 5.0) -> str | None:
        """Why the server cannot be used, if it cannot: for a check before a run."""
        try:
            answer = httpx.get(f"{self.url}{PING}", timeout=within_s, trust_env=False, headers=api_headers())
            if answer.status_code == 200:
                return None
            if answer.status_code == 401:
                return f"the sandbox at {self.url} rejects the API key. Set VERL_API_KEY to the key of the server."
            found = f"{PING} answered with status {answer.status_code}"
        except httpx.HTTPError as error:
            found = str(error) or repr(error)
        return f"no sandbox answers at {self.url} ({found}). Start one: python -m verl.sandbox.server"

    def close(self) -> None:
        """Close the connections that `run` opened; those of event loops end with them."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _request(
        self,
        code: str,
        language: str,
        stdin: str,
        files: Mapping[str, bytes] | None,
        fetch: Sequence[str],
        limits: Limits | None,
    ) -> tuple[dict[str, Any], httpx.Timeout]:
        """(JSON of the request, how long it may take)"""
        memory = self._memory_mb if limits is None else limits.memory_mb
        request = run_request(code, language, stdin, files or {}, fetch, limits, memory)
        seconds = 2 * DEFAULT_SECONDS if limits is None else limits.wall_s + limits.compile_s
        return request, httpx.Timeout(seconds + self._queue_s, connect=5.0)

    def _in_this_loop(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._of_loop:
                unlimited = httpx.Limits(max_connections=None)
                client = httpx.AsyncClient(trust_env=False, limits=unlimited, headers=api_headers())
                self._of_loop[loop] = client, asyncio.Semaphore(self._most)
            return self._of_loop[loop]

    def _done(self, answer: httpx.Response | Exception, attempt: int) -> Result | None:
        """The result, or None where another attempt is worth it; the last one raises what is wrong."""
        try:
            if isinstance(answer, Exception):
                raise answer
            if answer.status_code in _BUSY:
                raise ServerFailed(f"status {answer.status_code}: {answer.text[:200]}")
            if answer.status_code != 200:
                raise ValueError(f"{self.url} refused to run code, status {answer.status_code}: {answer.text[:500]}")
            return result_from_json(answer.json())
        except (ServerFailed, *_LOST) as error:
            if attempt < self._attempts:
                return None
            why = f"the sandbox server at {self.url} did not run the code, {attempt} times"
            raise SandboxUnavailable(f"{why}: {str(error) or repr(error)}") from error
        except httpx.HTTPError as error:
            raise SandboxUnavailable(f"the sandbox server at {self.url} gave no answer: {error!r}") from error

    def _pause(self, answer: httpx.Response | Exception, attempt: int) -> float:
        asked = "" if isinstance(answer, Exception) else answer.headers.get("retry-after", "")
        seconds = float(asked) if asked.isdecimal() else self._pause_s * 2 ** (attempt - 1)
        return min(seconds, _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
