"""A copy of tensors in host memory that is taken while other work goes on.

It lies in ordinary memory, made ahead where its size is known, and used again: locking the pages of a large model's
state would take half a minute and stall the device. What is on a device comes through a few small page-locked buffers.
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

# Where a tensor begins in a snapshot: on a cache line.
_ALIGNMENT = 64
# Page-locked buffers, and how much of one is copied at a time: small copies of others come in between.
_BUFFERS, _BUFFER, _COPY = 4, 64 * 2**20, 16 * 2**20
# Ordinary memory is written by so many threads: its pages are made when they are first touched, which one alone does
# at a fraction of a device's speed.
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))

Piece = tuple[int, torch.Tensor]
"""Where bytes begin in a snapshot, and the bytes."""


class HostSnapshot:
    """The bytes of named tensors as they were at one moment."""

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
        """Bytes of ordinary host memory that it holds."""
        return 0 if self._memory is None else len(self._memory)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make memory for tensors of these sizes in the background, so that `take` finds it; nothing is taken yet."""
        with suppress(OSError):  # there is no room: `take` says so, if it is ever called
            self._make_room(_starts(sizes)[-1])
        self._untouched = iter(range(0, self.size, _BUFFER))
        self._touching = [run_in_thread("snapshot memory", self._touch) for _ in range(_THREADS)]

    def _touch(self) -> None:
        """Each piece of memory by one thread: its pages are made when they are first written to."""
        if sys.platform == "linux":  # there, this is the priority of a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for start in self._untouched:
            self._bytes[start : start + _BUFFER : mmap.PAGESIZE] = 0

    def _stop_touching(self) -> None:
        """What is left is made by the copy, as it goes."""
        for _ in self._untouched:
            pass
        futures.wait(self._touching)

    def take(
        self, tensors: Mapping[str, torch.Tensor], sources: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Start the copy; returns what it will be, tensor by tensor. Earlier ones' memory is used again.

        `sources`: the bytes of each of `tensors`, in host memory or on the device. They may not change before `wait`.
        """
        self.wait()
        self._stop_touching()
        starts = _starts([value.nbytes for value in tensors.values()])
        self._make_room(starts[-1])
        found: dict[str, torch.Tensor] = {}
        here: list[Piece] = []
        there: list[Piece] = []
        for (name, value), start in zip(tensors.items(), starts, strict=False):
            found[name] = self._tensor_at(start, value)
            for source in sources[name]:
                (here if source.device.type == "cpu" else there).append((start, source))
                start += len(source)
        if there:
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._copy = run_in_thread("snapshot", lambda: self._run(here, there))
        return found

    def wait(self) -> None:
        """Until nothing that was given to `take` is read any more, also where the copy failed."""
        if self._copy is not None:
            futures.wait([self._copy])

    def check(self) -> None:
        """Wait for the copy, and raise what went wrong."""
        if self._copy is not None:
            self._copy.result()

    def _tensor_at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        # A storage of its own: what writes files would copy a part of a larger one first.
        memory = memoryview(self._bytes).cast("B")[start : start + like.nbytes]
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    @property
    def _bytes(self) -> np.ndarray:
        assert self._memory is not None
        return self._memory.numpy()

    def _make_room(self, size: int) -> None:
        if self.size >= size:
            return
        self._memory = None
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def _run(self, here: list[Piece], there: list[Piece]) -> None:
        with ThreadPoolExecutor(_THREADS, "snapshot") as threads:
            if there:
                self._from_device(there, threads)
            pieces = ((start + at, part) for start, source in here for at, part in _cut(source, _BUFFER))
            for done in [threads.submit(self._put, start, part) for start, part in pieces]:
                done.result()

    def _from_device(self, pieces: list[Piece], threads: ThreadPoolExecutor) -> None:
        """Buffer by buffer: filled by the device, emptied by threads, while the next one fills."""
        if not self._staging:
            self._staging = [torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
        emptied: list[list[Future[None]]] = [[] for _ in self._staging]
        filled: list[tuple[int, torch.cuda.Event, int, int]] = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for turn, (begin, end, parts) in enumerate(_windows(pieces)):
                slot = turn % _BUFFERS
                if len(filled) == _BUFFERS - 1:
                    self._empty(filled.pop(0), emptied, threads)
                for done in emptied[slot]:
                    done.result()
                for start, part in parts:
                    self._staging[slot][start - begin : start - begin + len(part)].copy_(part, non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)
                arrived.record(self._stream)
                filled.append((slot, arrived, begin, end))
            for each in filled:
                self._empty(each, emptied, threads)
        for done in chain(*emptied):
            done.result()

    def _empty(
        self,
        filled: tuple[int, torch.cuda.Event, int, int],
        emptied: list[list[Future[None]]],
        threads: ThreadPoolExecutor,
    ) -> None:
        slot, arrived, begin, end = filled
        arrived.synchronize()
        share = -(-(end - begin) // _THREADS)
        emptied[slot] = [
            threads.submit(self._put, begin + at, part) for at, part in _cut(self._staging[slot][: end - begin], share)
        ]

    def _put(self, start: int, source: torch.Tensor) -> None:
        # numpy's copy leaves the interpreter to others and starts no threads of its own.
        np.copyto(self._bytes[start : start + len(source)], source.numpy())


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where tensors of these sizes begin, and where all end."""
    found = [0]
    for size in sizes:
        found.append(-(-(found[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return found


def _cut(source: torch.Tensor, size: int) -> Iterator[Piece]:
    """Parts of at most `size` bytes, each with where it begins in `source`."""
    ends = [*range(0, len(source), size), len(source)]
    return ((start, source[start:stop]) for start, stop in pairwise(ends))


def _windows(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, list[Piece]]]:
    """Neighbouring pieces that fit one buffer together: (begin, end, pieces cut into single copies)."""
    window: list[Piece] = []
    begin = end = 0
    for start, source in pieces:
        for at, part in _cut(source, _COPY):
            stop = start + at + len(part)
            if window and (stop - begin > _BUFFER or start + at - end >= _ALIGNMENT):
                yield begin, end, window
                window = []
            if not window:
                begin = start + at
            window.append((start + at, part))
            end = stop
    if window:
        yield begin, end, window
