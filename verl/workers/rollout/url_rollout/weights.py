"""The trainer's weights on their way to a server, by its own way of taking them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import nn

from verl.types.weights import Bucket, Manifest, Wanted
from verl.utils.concurrency import run_in_thread
from verl.utils.transfer_group import TransferLostError
from verl.workers.rollout.checkpoint_names import checkpoint_tensors
from verl.workers.rollout.received_weights import ReceivedWeights
from verl.workers.rollout.url_rollout.server import Server, ServerLostError

__all__ = ["ServerWeights", "WeightLine", "during", "own_address"]

T = TypeVar("T")


class WeightLine(Protocol):
    """How tensors get to one kind of server."""

    def begin(self) -> None: ...

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """These have arrived when it returns, or it raises."""

    def finish(self) -> None:
        """All came: the server computes with them."""

    def leave(self) -> None:
        """Forget the group: its other members are gone, or wait for something else. Another one is made."""


class ServerWeights:
    """A `WeightStore` at the end of a line. Where the server's memory goes is its own affair."""

    held_bytes = 0

    def __init__(self, line: WeightLine, skeleton: nn.Module, dtype: torch.dtype) -> None:
        """`skeleton`: the model on the meta device."""
        self._line, self._skeleton = line, skeleton
        self._received = ReceivedWeights(skeleton, dtype)

    def check_manifest(self, manifest: Manifest | None) -> None:
        self._received.check_manifest(manifest)

    def wanted(self) -> Wanted | None:
        return None

    def begin(self) -> None:
        self._received.begin()
        with self._left_if_it_fails():
            self._line.begin()

    def load(self, tensors: Bucket) -> None:
        self._received.add(tensors)
        with self._left_if_it_fails():
            self._line.send(checkpoint_tensors(tensors, self._skeleton))

    def verify(self, expected: Mapping[str, int]) -> None:
        self._received.verify(expected)
        self._line.finish()

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    @contextmanager
    def _left_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._line.leave()
            raise


def during(server: Server, ours: Callable[[], object], theirs: Callable[..., T], *args: Any, **keys: Any) -> T:
    """What `theirs`, a call of the server's half of what both do at once, answers when `ours` is done, too.

    If it fails it is raised at once: our half then waits for nobody, and is left alone. Where we lose each other, what
    the server says tells more.
    """
    asked = run_in_thread("rollout-weights", lambda: theirs(*args, **keys))
    done = run_in_thread("rollout-weights", ours)
    both: list[Future[Any]] = [asked, done]
    wait(both, return_when=FIRST_COMPLETED)
    if asked.done():
        asked.result()
    try:
        done.result()
    except TransferLostError as error:
        if asked.done():
            asked.result()
        raise ServerLostError(f"rollout.server_urls: {server.url} left a hand-over: {error}") from error
    return asked.result()


def own_address(server: Server) -> str:
    """This machine as the server reaches it. What meets there listens on all of the machine's addresses."""
    where = urlsplit(server.url)
    default = 443 if where.scheme == "https" else 80
    try:
        with socket.create_connection((where.hostname, where.port or default), timeout=30) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        raise ServerLostError(f"rollout.server_urls: {server.url} does not answer: {error}.") from error
