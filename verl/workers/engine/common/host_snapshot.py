"""HostSnapshot: an asynchronous copy of tensors in host memory.

The copy is in pageable memory, allocated ahead if its size is known, and reused: page-locking memory for the state of a
large model would take half a minute and stall the device. Device tensors are copied through small page-locked buffers.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise

import numpy as np
import torch

from verl.utils.concurrency import run_in_thread

# Alignment of tensors in a snapshot: a cache line.
_ALIGNMENT = 64
# Number and size of the page-locked buffers, and the largest single copy: copies of other streams can run in between.
_BUFFERS, BUFFER_BYTES, COPY_BYTES = 4, 64 * 2**20, 16 * 2**20
# Threads that write pageable memory: the kernel allocates its pages at the first write, which one thread alone does at
# a fraction of the device's speed.
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))

Piece = tuple[int, torch.Tensor]
"""(offset in the snapshot, bytes)."""


class HostSnapshot:
    """A copy of named tensors at one moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._staging: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._copy: Future[None] | None = None
        self._untouched: Iterator[int] = iter(())
        self._touching: list[Future[None]] = []

    @property
    def size(self) -> int:
        """Bytes of allocated pageable memory."""
        return 0 if self._memory is None else len(self._memory)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Allocate memory for tensors of these sizes in the background; nothing is copied yet."""
        with suppress(OSError):  # not enough memory: a later `take` raises
            self._allocate(_offsets(sizes)[-1])
        self._untouched = iter(range(0, self.size, BUFFER_BYTES))
        self._touching = [run_in_thread("snapshot memory", self._touch) for _ in range(_THREADS)]

    def _touch(self) -> None:
        """Write to every page, so that the kernel allocates it. Run by several threads."""
        if sys.platform == "linux":  # where it sets the priority of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for start in self._untouched:
            self._bytes[start : start + BUFFER_BYTES : mmap.PAGESIZE] = 0

    def _stop_touching(self) -> None:
        """Leave the allocation of the remaining pages to the copy."""
        for _ in self._untouched:
            pass
        futures.wait(self._touching)

    def take(
        self, tensors: Mapping[str, torch.Tensor], sources: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Start a copy and return its tensors, which are valid after `check`. Overwrites earlier copies.

        `sources`: for each name in `tensors`, the parts that make up its bytes, in host memory or on the device. They
        must not change before `wait` returns.
        """
        self.wait()
        self._stop_touching()
        offsets = _offsets([value.nbytes for value in tensors.values()])
        self._allocate(offsets[-1])
        copies: dict[str, torch.Tensor] = {}
        on_host: list[Piece] = []
        on_device: list[Piece] = []
        for (name, value), offset in zip(tensors.items(), offsets, strict=False):
            copies[name] = self._tensor_at(offset, value)
            for source in sources[name]:
                (on_host if source.device.type == "cpu" else on_device).append((offset, source))
                offset += len(source)
        if on_device:
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._copy = run_in_thread("snapshot", lambda: self._run(on_host, on_device))
        return copies

    def wait(self) -> None:
        """Wait until the sources of `take` are no longer read, also if the copy failed."""
        if self._copy is not None:
            futures.wait([self._copy])

    def check(self) -> None:
        """Wait for the copy and raise its error."""
        if self._copy is not None:
            self._copy.result()

    def _tensor_at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        # A storage of its own: writers of files would copy a part of a larger storage first.
        memory = self._bytes.data.cast("B")[start : start + like.nbytes]
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    @property
    def _bytes(self) -> np.ndarray:
        assert self._memory is not None
        return self._memory.numpy()

    def _allocate(self, size: int) -> None:
        if self.size >= size:
            return
        self._memory = None
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def _run(self, on_host: list[Piece], on_device: list[Piece]) -> None:
        with ThreadPoolExecutor(_THREADS, "snapshot") as threads:
            if on_device:
                self._copy_from_device(on_device, threads)
            pieces = ((start + at, part) for start, source in on_host for at, part in _cut(source, BUFFER_BYTES))
            for done in [threads.submit(self._write, start, part) for start, part in pieces]:
                done.result()

    def _copy_from_device(self, pieces: list[Piece], threads: ThreadPoolExecutor) -> None:
        """Copy buffer by buffer: threads empty a buffer while the device fills the next one."""
        if not self._staging:
            self._staging = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
        emptied: list[list[Future[None]]] = [[] for _ in self._staging]
        filled: list[tuple[int, torch.cuda.Event, int, int]] = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for number, (begin, end, parts) in enumerate(_windows(pieces)):
                slot = number % _BUFFERS
                if len(filled) == _BUFFERS - 1:
                    self._empty(filled.pop(0), emptied, threads)
                for done in emptied[slot]:
                    done.result()
                for start, part in parts:
                    self._staging[slot][start - begin : start - begin + len(part)].copy_(part, non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)
                arrived.record(self._stream)
                filled.append((slot, arrived, begin, end))
            for buffer in filled:
                self._empty(buffer, emptied, threads)
        for done in chain(*emptied):
            done.result()

    def _empty(
        self,
        filled: tuple[int, torch.cuda.Event, int, int],
        emptied: list[list[Future[None]]],
        threads: ThreadPoolExecutor,
    ) -> None:
        """Start the threads that write a filled buffer to pageable memory."""
        slot, arrived, begin, end = filled
        arrived.synchronize()
        share = -(-(end - begin) // _THREADS)
        emptied[slot] = [
            threads.submit(self._write, begin + at, part)
            for at, part in _cut(self._staging[slot][: end - begin], share)
        ]

    def _write(self, start: int, source: torch.Tensor) -> None:
        # numpy's copy releases the GIL and starts no threads of its own.
        np.copyto(self._bytes[start : start + len(source)], source.numpy())


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of tensors of these sizes, and the total size."""
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _cut(source: torch.Tensor, size: int) -> Iterator[Piece]:
    """Yield parts of at most `size` bytes of `source`, with their offsets in it."""
    ends = [*range(0, len(source), size), len(source)]
    return ((start, source[start:stop]) for start, stop in pairwise(ends))


def _windows(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, list[Piece]]]:
    """Group adjacent pieces that fit into one buffer: (begin, end, pieces split into single copies)."""
    window: list[Piece] = []
    begin = end = 0
    for start, source in pieces:
        for at, part in _cut(source, COPY_BYTES):
            stop = start + at + len(part)
            if window and (stop - begin > BUFFER_BYTES or start + at - end >= _ALIGNMENT):
                yield begin, end, window
                window = []
            if not window:
                begin = start + at
            window.append((start + at, part))
            end = stop
    if window:
        yield begin, end, window
