"""Tensors of a device that wait in host memory, so that other phases can use the device's.

A tensor that is away keeps its identity: only its storage is emptied, so every view of it (a shard, its padded whole,
an alias in a buffer) is away and comes back with it, bit for bit. Host memory is page-locked once and used again:
locking costs far more than the copy. What was there before and has not changed since is not copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# torch rounds page-locked memory up to a power of two; in pieces of that size nothing is lost.
_PIECE = 1 << 28


class EngineMemory:
    """Where the parts of an engine are: on its device, or waiting in host memory."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        moments: Callable[[], Iterable[torch.Tensor]],
        offload_gradients: bool,
    ) -> None:
        """`moments` gives the optimizer's tensors as they are when asked."""
        self._device = device
        self._model, self._moments = model, moments
        self._weights, self._buffers, self._states = (OffloadedTensors(device) for _ in range(3))
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients = OffloadedGradients(learning, device)
        self._same: set[OffloadedTensors] = set()  # those that host memory holds as they are now
        self._lent: set[int] = set()  # storages of the device that are read beside everything else
        self._settle: Callable[[], None] = lambda: None
        self.offloads_gradients = offload_gradients

    def leave(self, model: bool, optimizer: bool) -> None:
        """To host memory; gradients, if there are any, go with the model. On a CPU everything is there already."""
        if self._device.type == "cpu":
            return
        if model and not self._weights.away:
            self._gradients.leave()
            self._weights.leave(self._model.parameters(), self._weights in self._same, self._before_use)
            self._buffers.leave(self._model.buffers())
            self._same.add(self._weights)
        if optimizer and not self._states.away:
            self._states.leave(self._moments(), self._states in self._same, self._before_use)
            self._same.add(self._states)
        torch.cuda.empty_cache()

    def come_back(self, model: bool, optimizer: bool) -> None:
        """Weights can be used at once; moments arrive beside what is computed, until `ready`."""
        if model:
            for part in (self._weights, self._buffers):
                part.come_back()
                part.wait()
        if optimizer:
            self._states.come_back()

    def lend(self, tensors: Mapping[str, torch.Tensor], settle: Callable[[], None]) -> dict[str, list[torch.Tensor]]:
        """Tensors of this rank as rows of bytes where they are now: on the device, or waiting in host memory.

        `settle` waits until they are read. It is called before any of them changes, or goes away.
        """
        self._states.wait()
        self._lent, self._settle = set(), settle
        return {name: self._bytes_of(value) for name, value in tensors.items()}

    def _bytes_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        if not local.numel():
            return []
        flat = local.contiguous().view(-1)
        storage, start = flat.untyped_storage(), flat.storage_offset() * flat.itemsize
        for part in (self._weights, self._states):
            if (place := part.place(storage)) is not None:
                return part.waiting(place + start, flat.nbytes)
        if (place := self._buffers.place(storage)) is not None:  # few and small, and they leave without asking
            return [waiting.clone() for waiting in self._buffers.waiting(place + start, flat.nbytes)]
        self._lent.add(storage._cdata)
        return [flat.view(torch.uint8)]

    def _before_use(self, storages: Collection[int], host: bool) -> None:
        """Before these storages of the device are emptied, and `host` memory where they wait is overwritten."""
        if host or not self._lent.isdisjoint(storages):
            self._settle()

    def before_micro_batch(self) -> None:
        """With offloaded gradients, those of earlier micro-batches make room."""
        if self.offloads_gradients:
            self._gradients.leave()

    def ready(self) -> None:
        """Gradients are whole and moments have arrived: what reads them may start."""
        self._gradients.come_back()
        self._states.wait()

    def before_change(self) -> None:
        """The same, and weights and moments may change: nothing reads them, and host memory's are old from now on."""
        self.ready()
        self._settle()
        self._same.clear()


class OffloadedTensors:
    """A group of tensors (a model's, an optimizer's) that leave the device and come back together."""

    def __init__(self, device: torch.device) -> None:
        self._host = HostBuffer(page_locked=device.type == "cuda")
        self._copies = CopyStream(device)
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._places: dict[int, int] = {}  # in host memory, the first byte of each storage that left last

    @property
    def away(self) -> bool:
        return bool(self._away)

    def leave(
        self,
        tensors: Iterable[torch.Tensor],
        same: bool = False,
        before_use: Callable[[Collection[int], bool], None] = lambda storages, host: None,
    ) -> None:
        """Copy to host memory and give the device's back; the tensors may not be read until `come_back`.

        `same`: they are as they were when they came back. `before_use` is told which storages are emptied, and whether
        host memory is written.
        """
        if self._away:
            raise RuntimeError("offload: these tensors are away already.")
        self._copies.wait()
        storages = list(_unique_storages(tensors))
        *starts, total = accumulate((size for _, size in storages), initial=0)
        places = {storage._cdata: start for (storage, _), start in zip(storages, starts, strict=True)}
        copied = storages if not same or places != self._places else []
        before_use(places, bool(copied))
        if copied:
            self._host.grow(total)
        with self._copies:
            for storage, size in copied:
                self._host.store(places[storage._cdata], _all_bytes(storage, size))
        self._copies.synchronize()  # memory that is still being read may not be given away
        for storage, _ in storages:
            storage.resize_(0)
        self._away, self._places = storages, places

    def place(self, storage: torch.UntypedStorage) -> int | None:
        """The first byte in host memory of a storage that is away; None where it is here."""
        return self._places.get(storage._cdata) if self._away else None

    def waiting(self, start: int, size: int) -> list[torch.Tensor]:
        """Bytes of what is away, which stay as they are until it leaves again."""
        return self._host.parts(start, size)

    def come_back(self) -> None:
        """Take device memory again and start the copies; `wait` before the first use."""
        storages, self._away = self._away, []
        if not storages:
            return
        for storage, size in storages:
            storage.resize_(size)
        with self._copies:
            for storage, size in storages:
                self._host.load(self._places[storage._cdata], _all_bytes(storage, size))

    def wait(self) -> None:
        """What is computed from now on sees the copies that were started; the host does not wait."""
        self._copies.wait()


class OffloadedGradients:
    """Gradients whose sum over earlier micro-batches waits in host memory while the next one runs.

    A gradient is `new + sum so far`, the same addition that autograd would have made on the device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self._host = HostBuffer(page_locked=device.type == "cuda")
        self._copies = CopyStream(device)
        self._places: list[int] = []  # the first byte of each gradient in host memory
        self._waiting: set[int] = set()

    def leave(self) -> None:
        """Add what waits to the gradients there are, and let the sums wait instead; the device's memory is free."""
        self._add_waiting()
        self._take_places()
        found = {i: local_shard(p.grad) for i, p in enumerate(self._parameters) if p.grad is not None}
        with self._copies:
            for index, gradient in found.items():
                self._host.store(self._places[index], _bytes_of(gradient))
        self._copies.synchronize()
        for index in found:
            self._parameters[index].grad = None
        self._waiting |= set(found)

    def come_back(self) -> None:
        """All gradients are whole and on the device."""
        self._add_waiting()
        for index in self._waiting:
            parameter = self._parameters[index]
            parameter.grad = sharded_like(parameter, self._fetched(index))
        self._waiting = set()

    def _add_waiting(self) -> None:
        """Parameters that have a new gradient get their sum; the others' goes on waiting."""
        for index in list(self._waiting):
            gradient = self._parameters[index].grad
            if gradient is not None:
                local_shard(gradient).add_(self._fetched(index))
                self._waiting.remove(index)

    def _fetched(self, index: int) -> torch.Tensor:
        fetched = torch.empty_like(local_shard(self._parameters[index]))
        self._host.load(self._places[index], _bytes_of(fetched))
        return fetched

    def _take_places(self) -> None:
        if not self._places:
            sizes = [local_shard(parameter).nbytes for parameter in self._parameters]
            *self._places, total = accumulate(sizes, initial=0)
            self._host.grow(total)


class HostBuffer:
    """Host bytes that are taken once, page-locked for a GPU's sake, and grow when more is asked for."""

    def __init__(self, page_locked: bool) -> None:
        self._page_locked = page_locked
        self._pieces: list[torch.Tensor] = []

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def grow(self, size: int) -> None:
        """Have room for `size` bytes; what was stored is lost if that is more than before."""
        if self.size >= size:
            return
        if self._pieces and len(self._pieces[-1]) < _PIECE:
            self._pieces.pop()
        while self.size < size:
            length = min(_PIECE, size - self.size)
            self._pieces.append(torch.empty(length, dtype=torch.uint8, pin_memory=self._page_locked))

    def store(self, start: int, data: torch.Tensor) -> None:
        """Copy bytes to here, from `start` on."""
        for here, there in self._aligned(start, data):
            here.copy_(there, non_blocking=True)

    def load(self, start: int, data: torch.Tensor) -> None:
        """Copy bytes from here, from `start` on."""
        for here, there in self._aligned(start, data):
            there.copy_(here, non_blocking=True)

    def parts(self, start: int, size: int) -> list[torch.Tensor]:
        """Bytes from `start` on, piece by piece."""
        found, end = [], start + size
        while start < end:
            index, offset = divmod(start, _PIECE)
            length = min(_PIECE - offset, end - start)
            found.append(self._pieces[index][offset : offset + length])
            start += length
        return found

    def _aligned(self, start: int, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parts = self.parts(start, len(other))
        return zip(parts, other.split([len(part) for part in parts]), strict=True)


class CopyStream:
    """A stream for copies between host and device: `with` it they run beside what is computed. Nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._context: torch.cuda.StreamContext | None = None
        self._pending = False

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
            self._pending = True

    def wait(self) -> None:
        """The current stream goes on after the copies."""
        if self._pending and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._pending = False

    def synchronize(self) -> None:
        """The host goes on after the copies."""
        if self._pending and self._stream is not None:
            self._stream.synchronize()
        self._pending = False


def local_shard(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a graph; a plain tensor is its own."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def sharded_like(parameter: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """`local` as the shard of a tensor laid out as `parameter` is, over its mesh or another one of that shape."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        mesh or parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _unique_storages(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The storages under the local parts, each once, with their sizes; empty ones hold nothing to move."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage, storage.nbytes()


def _all_bytes(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """A storage as one row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one row of bytes."""
    return tensor.view(-1).view(torch.uint8)
