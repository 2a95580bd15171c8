"""The messages between a ProcessRollout and the process of its engine, and the channel that transports them."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.single_controller.base.worker_group import Failure
from verl.types.request import Output
from verl.types.weights import RequestedRows
from verl.utils.exceptions import RemoteTraceback


@dataclass(frozen=True)
class EngineSpec:
    """Arguments of `build`, the first call: the engine to create."""

    class_path: str
    """The engine's class, `module:Class`."""
    model_path: str
    model_config: ModelConfig
    config: RolloutConfig
    device: str
    threads: int
    """Number of torch threads, as in the calling process: floating-point sums depend on it."""


@dataclass(frozen=True)
class EngineInfo:
    """Properties of the engine: the reply to `build`."""

    version: int
    weight_dtype: torch.dtype
    eos_token_ids: frozenset[int]
    pad_token_id: int
    requested_rows: RequestedRows | None


@dataclass(frozen=True)
class MethodCall:
    """A call of a method of the engine or its host."""

    number: int | None
    """Number of the reply; None: no reply is sent."""
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class MethodReply:
    """The result of a call, or its exception."""

    number: int
    value: Any
    failure: Failure | None = None


@dataclass(frozen=True)
class FinishedRequests:
    """Outputs or exceptions of finished requests, with the numbers under which they were submitted."""

    outputs: list[tuple[int, Output | Failure]]


@dataclass(frozen=True)
class ProgressReport:
    """The engine's process made progress."""

    step: str | None = None
    """The current step of the engine's start; None: unknown, or the engine has started."""


def remote_exception(failure: Failure) -> Exception:
    """The exception of the other process, with its traceback as the cause."""
    exception = failure.exception()
    error = exception if isinstance(exception, Exception) else RuntimeError(failure.summary)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error


_LENGTH = struct.Struct("<Q")


class MessageChannel:
    """One end of a private socket pair of two processes of this program. A message is its length and its pickle. Any
    thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._send_lock = threading.Lock()
        self._reader = end.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message. OSError if the other end is closed."""
        data = pickle.dumps(message, protocol=5)
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for the next message. EOFError or OSError if the other end is closed."""
        return pickle.loads(self._read(*_LENGTH.unpack(self._read(_LENGTH.size))))

    def close(self) -> None:
        """Close the connection; waiting receivers at both ends return."""
        with contextlib.suppress(OSError):  # the other end is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            raise EOFError
        return data
