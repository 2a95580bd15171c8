"""ProcessRollout: a rollout whose engine runs in its own process. Requests and outputs are sent in batches over a
channel, weights through shared memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.single_controller.base.worker_group import Failure
from verl.types.request import EngineDiedError, Output, Request
from verl.types.weights import Bucket, Manifest, RequestedRows, TensorSpec
from verl.utils.exceptions import RemoteTraceback
from verl.utils.process_tree import describe_exit, kill_group, kill_tree_but_trackers
from verl.utils.progress import activity, add_helper, pulse, remove_helper
from verl.workers.rollout.base import RELEASE_TAGS, BaseRollout, Load
from verl.workers.rollout.process.transport import (
    EngineInfo,
    EngineSpec,
    FinishedRequests,
    MessageChannel,
    MethodCall,
    MethodReply,
    ProgressReport,
    SharedBuffer,
    open_shared_buffer,
    remote_exception,
)
from verl.workers.rollout.weights import bucket_layout, layout_bytes

_HOST_MODULE = "verl.workers.rollout.process.host"
_LOG_LINES = 20
# Time for the process to exit by itself, after `close` or when its channel is closed; then it is killed.
EXIT_TIMEOUT_S = 10.0


class ProcessRollout(BaseRollout):
    """Forwards all calls to an engine in a process, which it starts and ends."""

    def __init__(self, spec: EngineSpec, environment: Mapping[str, str], device: torch.device) -> None:
        """`environment`: the complete environment of the process. Buckets are shared on `device`, the engine's first
        device."""
        self.config = spec.config
        self._spec, self._environment, self._device = spec, dict(environment), device
        self._buffers: list[SharedBuffer] = []
        """The last buffer is in use; the engine's processes may still have earlier buffers open."""
        self._start()

    def _start(self) -> None:
        self._engine = EngineProcess(self._spec, self._environment)
        info = self._engine.info
        self.weight_dtype, self._requested_rows = info.weight_dtype, info.requested_rows
        self.eos_token_ids, self.pad_token_id = info.eos_token_ids, info.pad_token_id
        self._version = self._pending_version = info.version
        self._loading: Future[None] | None = None
        # A rollout that is garbage-collected leaves no process behind.
        self._finalizer = weakref.finalize(self, self._engine.kill)

    @property
    def version(self) -> int:
        return self._version

    @property
    def pid(self) -> int:
        """Process id of the engine's process."""
        return self._engine.pid

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        return self._engine.submit(list(requests))

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._engine.send_call("abort", None if ids is None else list(ids))

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        return self._engine.call("tokens_since", dict(positions)) if positions else {}

    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None:
        self._engine.call("pause_generation", mode, kv)

    def resume_generation(self) -> None:
        self._engine.call("resume_generation")

    def wait_idle(self) -> None:
        self._engine.call("wait_idle")

    # ---------------------------------------------------------------- weights

    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        self._loading = None
        specs = {name: TensorSpec(tuple(spec.shape), spec.dtype) for name, spec in (manifest or {}).items()}
        self._engine.call("begin_update", version, None if manifest is None else specs)
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self._pending_version, self._expected_size = version, _max_bucket_size(specs, self.weight_dtype, limit)

    def requested_rows(self) -> RequestedRows | None:
        return self._requested_rows

    def load_bucket(self, tensors: Bucket) -> None:
        """Copy tensors to shared memory. The engine loads them while the caller prepares the next bucket."""
        if not tensors:
            return
        self._wait_for_loading()
        size, capacity = layout_bytes(bucket_layout(tensors)), self._buffers[-1].handle.size if self._buffers else 0
        if size > capacity:
            self._buffers.append(self._new_buffer(max(size, self._expected_size, 2 * capacity)))
        self._loading = self._engine.start_call("load_bucket", self._buffers[-1].put(tensors))

    def _new_buffer(self, size: int) -> SharedBuffer:
        buffer = open_shared_buffer(size, self._device, partial(self._engine.call, "open_buffer"))
        self._device = buffer.flat.device
        return buffer

    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        self._wait_for_loading()
        self._engine.call("finish_update", dict(fingerprint))
        self._version = self._pending_version

    def fail_update(self, error: Exception) -> None:
        self._loading = None
        if self._engine.death is None:
            self._engine.call("fail_update", Failure.from_exception(error))

    def _wait_for_loading(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    # ---------------------------------------------------------------- memory and lifetime

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        self._engine.call("release", tags)

    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        self._engine.call("resume", tags)

    def held_bytes(self) -> dict[str, int]:
        """Device memory of the engine by purpose."""
        return self._engine.call("held_bytes")

    def load(self) -> Load:
        return self._engine.call("load")

    def restart_if_dead(self) -> bool:
        if self._engine.death is None:
            return False
        self._close_buffers()
        self._start()
        return True

    def close(self) -> None:
        self._finalizer.detach()
        try:
            self._engine.close()
        finally:
            self._close_buffers()

    def _close_buffers(self) -> None:
        """Close all buffers; the engine's processes must have ended."""
        while self._buffers:
            self._buffers.pop().close()


class EngineProcess:
    """One process of an engine. All methods are thread-safe. When the process ends, all waiting calls and requests fail
    with its exit status and the last lines of its log."""

    def __init__(self, spec: EngineSpec, environment: Mapping[str, str]) -> None:
        """Start the process and create the engine. `environment`: the complete environment of the process."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._replies: dict[int, Future[Any]] = {}
        """Unfinished calls by number."""
        self._outputs: dict[int, Future[Output]] = {}
        """Unfinished requests by number."""
        self._finished: queue.SimpleQueue[FinishedRequests | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._exit_expected = False
        self.death: EngineDiedError | None = None
        """Set when the process has ended."""
        self._step: str | None = "starting its process"
        file, self.log = tempfile.mkstemp(prefix="verl-engine-", suffix=".log")
        own_end, process_end = socket.socketpair()
        self._channel = MessageChannel(own_end)
        started: Future[None] = Future()
        with process_end, os.fdopen(file, "wb") as log:
            command = [sys.executable, "-m", _HOST_MODULE, str(process_end.fileno()), str(os.getpid())]
            options = {"env": dict(environment), "pass_fds": [process_end.fileno()], "stdout": log, "stderr": log}
            self._start_thread(self._run_process, started, command, options)
            started.result()
        add_helper(self.pid, lambda: bool(self._replies or self._outputs))
        self._start_thread(self._receive_messages)
        self._start_thread(self._resolve_requests)
        with activity(f"starting the {spec.config.name} engine", lambda: self._step):
            self.info: EngineInfo = self._build(spec)

    # ---------------------------------------------------------------- calls

    def start_call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the engine; return a future of its result."""
        reply: Future[Any] = Future()
        with self._lock:
            if self.death is not None:
                raise self.death
            number = next(self._numbers)
            self._replies[number] = reply
        self._send(MethodCall(number, method, args))
        return reply

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine and return its result."""
        return self.start_call(method, *args).result()

    def send_call(self, method: str, *args: Any) -> None:
        """Call a method of the engine without waiting for its end."""
        if self.death is None:
            self._send(MethodCall(None, method, args))

    def submit(self, requests: list[Request]) -> list[Future[Output]]:
        """Queue all requests, or none if one is invalid; cancelling a future aborts its request."""
        with self._lock:
            futures: dict[int, Future[Output]] = {next(self._numbers): Future() for _ in requests}
            self._outputs |= futures
        try:
            self.call("submit", list(futures), requests)
        except BaseException:
            self._pop_requests(futures)
            raise
        for number, future in futures.items():
            future.add_done_callback(partial(self._on_done, number))
        return list(futures.values())

    def close(self) -> None:
        """Close the engine and end the process."""
        self._exit_expected = True
        self._fail_requests(RuntimeError("the rollout engine was closed before this request was finished."))
        self._close_and_kill()

    def kill(self) -> None:
        """End the process without closing the engine."""
        self._exit_expected = True
        self._kill()

    def _close_and_kill(self) -> None:
        try:
            with contextlib.suppress(EngineDiedError, FutureTimeout):
                self.start_call("close").result(EXIT_TIMEOUT_S)
                self._ended.wait(EXIT_TIMEOUT_S)
        finally:
            self._kill()

    def _kill(self) -> None:
        """Kill the process and its descendants, and wait for its end."""
        if not self._ended.is_set():
            kill_tree_but_trackers(self.pid)
            if not self._ended.wait(EXIT_TIMEOUT_S):
                self._on_end(
                    f"rollout: the engine's process {self.pid} was killed but does not end. Its device may hang."
                )

    def _build(self, spec: EngineSpec) -> EngineInfo:
        try:
            return self.call("build", spec)
        except EngineDiedError:
            raise
        except BaseException as error:
            self._exit_expected = not os.path.getsize(self.log)
            if not self._exit_expected:  # the log has the causes of failures in the engine's own processes
                error.__cause__ = RemoteTraceback(f"{error.__cause__ or ''}\n{_describe_log(self.log)}")
            self._close_and_kill()
            raise

    def _pop_requests(self, numbers: Iterable[int]) -> list[Future[Output]]:
        with self._lock:
            futures = [self._outputs.pop(number, None) for number in numbers]
        return [future for future in futures if future is not None]

    def _on_done(self, number: int, future: Future[Output]) -> None:
        if future.cancelled():
            self._pop_requests([number])
            self.send_call("cancel", number)

    def _fail_requests(self, error: Exception) -> None:
        for future in self._pop_requests(list(self._outputs)):
            _resolve(future, error)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the process has ended: the threads below handle it
            self._channel.send(message)

    # ---------------------------------------------------------------- threads

    def _start_thread(self, run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, name="rollout-process", daemon=True).start()

    def _run_process(self, started: Future[None], command: list[str], options: dict[str, Any]) -> None:
        """Start the process and wait for its end. Linux ends it when the thread that started it ends, so this thread
        lives as long as the process."""
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
        except BaseException as error:  # noqa: BLE001 - raised in the constructor
            self._channel.close()
            Path(self.log).unlink(missing_ok=True)
            started.set_exception(error)
            return
        self.pid = process.pid
        started.set_result(None)
        status = describe_exit(process.wait())
        message = f"rollout: the engine's process {process.pid} {status}. {_describe_log(self.log)}"
        kill_group(process.pid)  # processes that it started and left behind
        if self._exit_expected:  # otherwise the error message names the log
            Path(self.log).unlink(missing_ok=True)
        self._on_end(message)

    def _on_end(self, message: str) -> None:
        """Fail unfinished and later calls with this message."""
        with self._lock:
            self.death = death = self.death or EngineDiedError(message)
            replies, self._replies = self._replies, {}
        remove_helper(self.pid)
        self._ended.set()
        self._channel.close()
        for reply in replies.values():
            reply.set_exception(death)

    def _receive_messages(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, MethodReply):
                    self._on_reply(message)
                elif isinstance(message, FinishedRequests):
                    self._finished.put(message)
                elif isinstance(message, ProgressReport):
                    self._step = message.step
                    pulse()
        except (EOFError, OSError):
            if not self._ended.wait(EXIT_TIMEOUT_S):
                self._kill()  # it has closed its end of the channel, but does not exit
        self._finished.put(None)

    def _on_reply(self, reply: MethodReply) -> None:
        with self._lock:
            future = self._replies.pop(reply.number, None)
        if future is None:
            return
        if reply.failure is None:
            future.set_result(reply.value)
        else:
            future.set_exception(remote_exception(reply.failure))

    def _resolve_requests(self) -> None:
        """Not in the receiving thread: callbacks of futures may call the engine and wait for its reply."""
        while (message := self._finished.get()) is not None:
            for number, output in message.outputs:
                for future in self._pop_requests([number]):
                    _resolve(future, remote_exception(output) if isinstance(output, Failure) else output)
        assert self.death is not None
        self._fail_requests(self.death)


def _max_bucket_size(manifest: Manifest, dtype: torch.dtype, limit: int) -> int:
    """Size of the largest bucket of these weights, including alignment: one tensor, or as many as fit into `limit`
    bytes."""
    dtypes = [dtype if spec.dtype.is_floating_point else spec.dtype for spec in manifest.values()]
    sizes = [math.prod(spec.shape) * kind.itemsize for spec, kind in zip(manifest.values(), dtypes, strict=True)]
    return max([min(sum(sizes), limit), *sizes]) + 16 * len(sizes)


def _resolve(future: Future[Output], result: Output | Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _describe_log(log: str) -> str:
    text = Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    lines = list(filter(str.strip, text.splitlines()))[-_LOG_LINES:]
    content = "\n".join(["Its last lines:", *(f"  {line}" for line in lines)]) if lines else "It is empty."
    return f"Its log is {log}. {content}"
