"""The connection to an inference server: control calls, token streams, and weight transfer.

`ServerAPI` and `WeightTransport` are implemented for each kind of server, in `vllm_server` and `sglang_server`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx
import torch
from torch import nn

from verl.config import RolloutConfig
from verl.inference.sequence import Sequence as TokenSequence
from verl.types.request import EngineDiedError
from verl.utils.concurrency import run_in_thread
from verl.utils.transfer_group import TransferGroup, TransferHost, TransferLostError
from verl.workers.rollout.streaming_server import StreamEvent
from verl.workers.rollout.weights import CheckpointWeights

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum time until a restarted server, or one behind an interrupted network, replies again.
RECONNECT_TIMEOUT_S = 120.0
_REPLY_TIMEOUT_S = 60.0
_RETRY_INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S = 30.0
# Errors of an interrupted connection; a rejected request raises none of these.
_CONNECTION_ERRORS = (httpx.NetworkError, httpx.ProtocolError, httpx.ConnectTimeout, httpx.PoolTimeout)
# A machine that loses power closes no connection: after 20 s without data it is probed every 5 s, and after 6 probes
# without a reply the connection is lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 50_000}
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEPALIVE.items()
        if hasattr(socket, name)
    ),
]


class ServerError(RuntimeError):
    """A server replied with an error, or is not suitable for this run."""


class ServerLostError(ServerError, EngineDiedError):
    """A server does not reply, or was restarted."""


class ControlClient:
    """HTTP calls to one server; errors name the URL, the call and the reply. Every call opens a new connection, because
    some servers close idle ones."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._closed = threading.Event()
        transport = httpx.HTTPTransport(
            limits=httpx.Limits(max_keepalive_connections=0), socket_options=_SOCKET_OPTIONS
        )
        self._http = httpx.Client(timeout=_REPLY_TIMEOUT_S, transport=transport, trust_env=False)

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of the reply."""
        return self._call("GET", path, params=params)

    def post(self, path: str, body: Any = None, timeout_s: float = _REPLY_TIMEOUT_S, **params: Any) -> Any:
        """The JSON of the reply; None if it is not JSON."""
        return self._call("POST", path, json=body, params=params, timeout=timeout_s)

    def has_endpoint(self, path: str) -> bool:
        """Whether a GET succeeds."""
        try:
            return self._http.get(self.url + path).is_success
        except httpx.HTTPError as error:
            raise ServerLostError(f"rollout.server_urls: {self.url} does not reply: {_describe(error)}.") from error

    def wait_for_reply(self) -> None:
        """Wait until the server replies again; ServerLostError after `RECONNECT_TIMEOUT_S`."""
        deadline = time.monotonic() + RECONNECT_TIMEOUT_S
        while True:
            try:
                if self.has_endpoint("/health"):
                    return
                problem = "it reports that it is not healthy"
            except ServerLostError as error:
                problem = _describe(error.__cause__ or error)
            if time.monotonic() > deadline:
                raise ServerLostError(
                    f"rollout.server_urls: {self.url} has not replied for {RECONNECT_TIMEOUT_S:.0f} s: {problem}. See"
                    " its log."
                )
            if self._closed.wait(_RETRY_INTERVAL_S):
                raise ServerLostError(
                    f"rollout.server_urls: the client of {self.url} was closed while it waited for a reply: {problem}."
                )

    def close(self) -> None:
        """Close the client; a running `wait_for_reply` raises."""
        self._closed.set()
        self._http.close()

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            reply = self._http.request(method, self.url + path, **options)
        except httpx.HTTPError as error:
            raise ServerLostError(
                f"rollout.server_urls: {self.url}{path} does not reply: {_describe(error)}."
            ) from error
        if not reply.is_success:
            raise ServerError(
                f"rollout.server_urls: {self.url}{path} answered {reply.status_code}: {reply.text.strip()[:2000]}"
            )
        try:
            return reply.json()
        except ValueError:
            return None


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


# ---------------------------------------------------------------- tokens


class ServerAPI(ABC):
    """The HTTP API of one kind of server."""

    path: str
    """Endpoint of generation requests."""
    log_probs_after_filtering: bool
    """Whether reported log-probs are after top-k, top-p and min-p."""

    # Set by `connect`.
    engine: str
    """Name and version of the engine."""
    device: torch.device
    dtype: torch.dtype
    max_streams: int
    """Maximum number of open streams: enough to keep the server busy."""
    expected_label: str | None
    """The label of the server's weights when it was connected, or since the last weight sync."""

    def __init__(self, client: ControlClient, model_path: str, config: RolloutConfig, hf_config: Any) -> None:
        """Connect; ServerError, with the right command line, if the server is not suitable for this run."""
        self.client = client
        self._config, self._hf_config = config, hf_config
        self._command = self._server_command(urlsplit(client.url), model_path)
        self.connect()

    @abstractmethod
    def connect(self) -> None:
        """Read the server's configuration; ServerError if the server is not suitable for this run."""

    @abstractmethod
    def build_request(self, sequence: TokenSequence) -> dict[str, Any]:
        """The request that continues a sequence after its tokens."""

    @abstractmethod
    def continue_request(self, request: dict[str, Any], generated: list[int]) -> dict[str, Any]:
        """The request that continues `request` after these generated tokens."""

    def parse_event(self, data: dict[str, Any], received: int) -> StreamEvent:
        """Parse an event of a stream after `received` tokens of the stream. ServerError if the event is an error."""
        if "error" in data:
            raise ServerError(f"{self.client.url}: {data['error']}")
        return self._parse_tokens(data, received)

    @abstractmethod
    def _parse_tokens(self, data: dict[str, Any], received: int) -> StreamEvent: ...

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    def top_log_probs(self, temperature: float, top_k: int) -> Mapping[int, float]:
        """Log-probs of the most likely tokens after `PROBE_PROMPT`."""

    @abstractmethod
    def weight_label(self) -> str | None:
        """The label of the server's current weights; None: unknown."""

    def set_weight_label(self, label: str) -> None:
        """Label the server's current weights."""
        self._post_label(label)
        self.expected_label = label

    @abstractmethod
    def _post_label(self, label: str) -> None: ...

    @abstractmethod
    def _server_command(self, url: SplitResult, model_path: str) -> str:
        """The command line that starts a suitable server at `url`."""

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise ServerError(
                f"rollout.server_urls: {self.client.url} is not suitable for this run: {problem}. Start it with\n"
                f"{self._command}"
            )


class HTTPTokenSource:
    """A `TokenSource` with one HTTP connection per request. An interrupted request continues after its last token, if
    the server replies again with the same weights."""

    def __init__(self, api: ServerAPI) -> None:
        self._api = api
        self.engine = f"{api.engine} at {api.client.url}"
        self.log = "the output of that server"
        self.max_streams = api.max_streams
        self.build_request, self.pause, self.resume = api.build_request, api.pause, api.resume
        self.reset_prefix_cache = api.reset_prefix_cache
        self._reconnecting: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(
            base_url=api.client.url,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), socket_options=_SOCKET_OPTIONS
            ),
            trust_env=False,
        )

    async def stream(self, request: dict[str, Any], generated: list[int]) -> AsyncGenerator[StreamEvent | None, None]:
        while True:
            yield None
            body = self._api.continue_request(request, generated) if generated else request
            earlier = len(generated)
            try:
                async with self._http.stream("POST", self._api.path, json=body) as reply:
                    await self._require_success(reply)
                    async for line in reply.aiter_lines():
                        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                            event = self._api.parse_event(json.loads(data), len(generated) - earlier)
                            yield event
                            if event[2]:
                                return
                raise httpx.RemoteProtocolError("the stream ended without a finish reason")
            except _CONNECTION_ERRORS as error:
                await self._reconnect(error)

    async def close(self) -> None:
        self._api.client.close()
        if self._reconnecting is not None:
            await asyncio.wait([self._reconnecting])
        await self._http.aclose()

    async def _require_success(self, reply: httpx.Response) -> None:
        if not reply.is_success:
            text = (await reply.aread()).decode(errors="replace").strip()
            raise ServerError(f"{self._api.client.url} answered {reply.status_code}: {text[:2000]}")

    async def _reconnect(self, error: Exception) -> None:
        """Wait until the server replies again; all interrupted streams share one wait."""
        if self._reconnecting is None or self._reconnecting.done():
            logger.warning(
                "rollout: the connection to %s was interrupted (%s). Waiting up to %.0f s for the server.",
                self._api.client.url,
                _describe(error),
                RECONNECT_TIMEOUT_S,
            )
            self._reconnecting = asyncio.create_task(asyncio.to_thread(self._wait_for_same_weights))
        await asyncio.shield(self._reconnecting)

    def _wait_for_same_weights(self) -> None:
        self._api.client.wait_for_reply()
        label, expected = self._api.weight_label(), self._api.expected_label
        if label is None or label != expected:
            raise ServerLostError(
                f"rollout.server_urls: {self._api.client.url} was restarted: its weights are {label!r}, not"
                f" {expected!r}. They must be synchronised again."
            )


# ---------------------------------------------------------------- weights


class WeightTransport(ABC):
    """Transfers tensors to one kind of server. This process and the server form a transfer group, which is created at
    the first update."""

    def __init__(self, api: ServerAPI, device: torch.device) -> None:
        """`device`: that of the tensors."""
        self._api, self._device = api, device
        self._group: TransferGroup | None = None
        self._group_name = ""
        self._updates = 0
        """Number of updates by this group."""

    def begin(self) -> None:
        if self._group is None:
            self._group_name, self._updates = uuid.uuid4().hex[:8], 0
            self._create_group(TransferHost(local_address(self._api.client)))
        self._begin_update()

    @abstractmethod
    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Transfer tensors; return when they have arrived."""

    def finish(self) -> None:
        """All tensors were sent: the server uses them from now on."""
        self._finish_update()
        self._updates += 1
        self._api.set_weight_label(f"verl-{self._group_name}-{self._updates}")

    def reset(self) -> None:
        """Abort the transfer group, whose other members are lost or out of step; `begin` creates a new one."""
        if self._group is not None:
            self._group.abort()
        self._group = None

    @abstractmethod
    def _create_group(self, host: TransferHost) -> None:
        """Create `_group` of this process, at `host`, and the server."""

    @abstractmethod
    def _begin_update(self) -> None: ...

    @abstractmethod
    def _finish_update(self) -> None:
        """End an update and verify it as far as the server supports it."""


class ServerWeights(CheckpointWeights):
    """The weights of a server. Its device memory is not managed by this process."""

    held_bytes = 0

    def __init__(self, transport: WeightTransport, skeleton: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(skeleton, dtype)
        self._transport = transport

    def _begin_update(self) -> None:
        with self._reset_on_error():
            self._transport.begin()

    def _send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        with self._reset_on_error():
            self._transport.send(tensors)

    def _finish_update(self) -> None:
        self._transport.finish()

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._transport.reset()
            raise


def run_both_sides(
    client: ControlClient, local: Callable[[], object], remote: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Run `local`, this process's side of a collective operation, concurrently with `remote`, the call that starts the
    server's side; return the result of `remote`.

    If `remote` fails, its error is raised at once, and `local` is abandoned. If the transfer is interrupted, an error
    of the server is preferred, as it names the cause.
    """
    remote_call = run_in_thread("rollout-weights", lambda: remote(*args, **kwargs))
    local_call = run_in_thread("rollout-weights", local)
    both: list[Future[Any]] = [remote_call, local_call]
    wait(both, return_when=FIRST_COMPLETED)
    if remote_call.done():
        remote_call.result()
    try:
        local_call.result()
    except TransferLostError as error:
        if remote_call.done():
            remote_call.result()
        raise ServerLostError(
            f"rollout.server_urls: the connection to {client.url} was lost in a weight sync: {error}"
        ) from error
    return remote_call.result()


def local_address(client: ControlClient) -> str:
    """The address under which the server reaches this machine. (Transfer groups listen on all addresses.)"""
    url = urlsplit(client.url)
    default_port = 443 if url.scheme == "https" else 80
    try:
        with socket.create_connection((url.hostname, url.port or default_port), timeout=30) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        raise ServerLostError(f"rollout.server_urls: {client.url} does not reply: {error}.") from error
