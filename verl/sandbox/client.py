"""`SandboxClient`: runs code on a SandboxFusion server, with the interface of a local sandbox."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence

import httpx

from verl.sandbox.fusion_api import DEFAULT_SECONDS, PING, RUN, ServerFailed, result_from_json, run_request
from verl.sandbox.types import Limits, Result
from verl.utils.network import api_headers

# Status codes and errors that are retried: the server is starting, restarting or busy.
_RETRIED_STATUS = (429, 500, 502, 503, 504)
_CONNECTION_ERRORS = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.RemoteProtocolError,
    httpx.ReadError,
    httpx.WriteError,
)
_MAX_PAUSE_S = 30.0
_QUEUE_S = 120.0


class SandboxUnavailable(RuntimeError):
    """The server did not run the code in any of the attempts."""


class SandboxClient:
    """Runs code on the server at `url` (`http://host:8080`, with or without `/run_code`).

    Connection errors, 5xx and 429 are retried, up to `attempts` attempts in all, after pauses that double from
    `pause_s`, with jitter. At most `max_concurrent` requests are in flight; a request may wait two minutes in
    the server in addition to its own time limit. `run` may be called from any thread.
    """

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int = 64,
        attempts: int = 4,
        pause_s: float = 0.5,
    ) -> None:
        self.url = url.rstrip("/").removesuffix(RUN)
        self._attempts, self._pause_s = attempts, pause_s
        self._slots = threading.BoundedSemaphore(max_concurrent)
        self._client: httpx.Client | None = None
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
        """Run a program. SandboxUnavailable: the server did not run it. ValueError: it rejected the request."""
        memory = None if limits is None else limits.memory_mb
        request = run_request(code, language, stdin, files or {}, fetch, limits, memory)
        seconds = 2 * DEFAULT_SECONDS if limits is None else limits.wall_s + limits.compile_s
        timeout = httpx.Timeout(seconds + _QUEUE_S, connect=5.0)
        with self._lock:
            client = self._client = self._client or httpx.Client(trust_env=False, headers=api_headers())
        with self._slots:
            for attempt in range(1, self._attempts + 1):
                response: httpx.Response | Exception
                try:
                    response = client.post(f"{self.url}{RUN}", json=request, timeout=timeout)
                except httpx.HTTPError as error:
                    response = error
                if (result := self._parse(response, attempt)) is not None:
                    return result
                time.sleep(self._pause(response, attempt))
        raise AssertionError("the last attempt returns or raises")

    def problem(self, timeout_s: float = 5.0) -> str | None:
        """Return why the server cannot be used, None if it can. For a check before a training run."""
        try:
            response = httpx.get(f"{self.url}{PING}", timeout=timeout_s, trust_env=False, headers=api_headers())
            if response.status_code == 200:
                return None
            if response.status_code == 401:
                return f"the sandbox at {self.url} rejects the API key. Set VERL_API_KEY to the key of the server."
            reason = f"{PING} returned status {response.status_code}"
        except httpx.HTTPError as error:
            reason = str(error) or repr(error)
        return f"no sandbox answers at {self.url} ({reason}). Start one: python -m verl.sandbox.server"

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _parse(self, response: httpx.Response | Exception, attempt: int) -> Result | None:
        """The result, or None if the request should be retried; raises if it must not, or after the last attempt."""
        try:
            if isinstance(response, Exception):
                raise response
            if response.status_code in _RETRIED_STATUS:
                raise ServerFailed(f"status {response.status_code}: {response.text[:200]}")
            if response.status_code != 200:
                raise ValueError(
                    f"{self.url} rejected the request, status {response.status_code}: {response.text[:500]}"
                )
            try:
                content = response.json()
            except ValueError as error:
                raise ServerFailed(f"the response is not JSON: {response.text[:200]}") from error
            return result_from_json(content)
        except (ServerFailed, *_CONNECTION_ERRORS) as error:
            if attempt < self._attempts:
                return None
            reason = f"the sandbox server at {self.url} did not run the code in {attempt} attempts"
            raise SandboxUnavailable(f"{reason}: {str(error) or repr(error)}") from error
        except httpx.HTTPError as error:
            raise SandboxUnavailable(f"no response from the sandbox server at {self.url}: {error!r}") from error

    def _pause(self, response: httpx.Response | Exception, attempt: int) -> float:
        retry_after = "" if isinstance(response, Exception) else response.headers.get("retry-after", "")
        seconds = float(retry_after) if retry_after.isdecimal() else self._pause_s * 2 ** (attempt - 1)
        return min(seconds, _MAX_PAUSE_S) * random.uniform(0.5, 1.5)
