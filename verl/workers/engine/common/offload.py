"""Offload an engine's tensors to host memory, so that other phases can use the device memory.

An offloaded tensor keeps its identity: only its storage is resized to 0, so every view of it (a shard, its padded
parent, an alias in a buffer) is offloaded and reloaded with it, bit for bit. Host memory is page-locked once and
reused, because locking takes far longer than the copy. Tensors that have not changed since the last reload are not
copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Size of one allocation of page-locked memory. torch rounds it up to a power of two, so this size wastes nothing.
PIECE_BYTES = 1 << 28


class EngineMemory:
    """Placement of an engine's weights, gradients and optimizer state: on the device, or in host memory."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        optimizer_tensors: Callable[[], Iterable[torch.Tensor]],
        offload_gradients: bool,
    ) -> None:
        """`optimizer_tensors` returns the current tensors of the optimizer state. `offload_gradients`: whether
        `before_micro_batch` offloads gradients."""
        self._device = device
        self._model, self._optimizer_tensors = model, optimizer_tensors
        self._weights, self._buffers, self._optimizer_state = (OffloadedTensors(device) for _ in range(3))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = OffloadedGradients(trained, device)
        self._unchanged: set[OffloadedTensors] = set()  # groups whose copy in host memory is up to date
        self._copied_storages: set[int] = set()  # device storages that a background copy reads
        self._wait_for_copy: Callable[[], None] = lambda: None  # see `byte_views`
        self.offloads_gradients = offload_gradients

    def offload(self, model: bool, optimizer: bool) -> None:
        """Move to host memory; gradients move with the model. No effect on a CPU."""
        if self._device.type == "cpu":
            return
        if model and not self._weights.is_offloaded:
            self.gradients.offload()
            self._weights.offload(self._model.parameters(), self._weights in self._unchanged, self._before_release)
            self._buffers.offload(self._model.buffers())
            self._unchanged.add(self._weights)
        if optimizer and not self._optimizer_state.is_offloaded:
            self._optimizer_state.offload(
                self._optimizer_tensors(), self._optimizer_state in self._unchanged, self._before_release
            )
            self._unchanged.add(self._optimizer_state)
        torch.cuda.empty_cache()

    def reload(self, model: bool, optimizer: bool) -> None:
        """Move to the device. Weights are usable at once; the optimizer state is copied asynchronously, and usable
        after `wait_ready`."""
        if model:
            for group in (self._weights, self._buffers):
                group.reload()
                group.wait()
        if optimizer:
            self._optimizer_state.reload()

    def byte_views(
        self, tensors: Mapping[str, torch.Tensor], wait_for_copy: Callable[[], None]
    ) -> dict[str, list[torch.Tensor]]:
        """Return views of the bytes of this rank's tensors, on the device or in host memory, for a background copy.

        `wait_for_copy()` must block until that copy has read all of them. It is called before any of them is changed or
        moved.
        """
        self._optimizer_state.wait()
        self._copied_storages, self._wait_for_copy = set(), wait_for_copy
        return {name: self._byte_view(value) for name, value in tensors.items()}

    def _byte_view(self, local: torch.Tensor) -> list[torch.Tensor]:
        if not local.numel():
            return []
        flat = local.contiguous().view(-1)
        storage, start = flat.untyped_storage(), flat.storage_offset() * flat.itemsize
        for group in (self._weights, self._optimizer_state):
            if (offset := group.host_offset(storage)) is not None:
                return group.host_bytes(offset + start, flat.nbytes)
        # Cloned: their host memory is overwritten without waiting for the background copy. Buffers are few and small.
        if (offset := self._buffers.host_offset(storage)) is not None:
            return [view.clone() for view in self._buffers.host_bytes(offset + start, flat.nbytes)]
        self._copied_storages.add(storage._cdata)
        return [flat.view(torch.uint8)]

    def _before_release(self, storages: Collection[int], overwrites_host: bool) -> None:
        """Wait for the background copy if it may still read these tensors.

        Called before the device memory of `storages` is freed; `overwrites_host`: host memory will be overwritten, too.
        """
        if overwrites_host or not self._copied_storages.isdisjoint(storages):
            self._wait_for_copy()

    def before_micro_batch(self) -> None:
        """Offload the gradients of earlier micro-batches, if `grad_offload` is set."""
        if self.offloads_gradients:
            self.gradients.offload()

    def wait_ready(self) -> None:
        """Complete the gradients on the device and wait for the optimizer state."""
        self.gradients.reload()
        self._optimizer_state.wait()

    def prepare_update(self) -> None:
        """Call before weights and optimizer state change.

        Calls `wait_ready`, waits for background copies, and marks the copies in host memory as outdated.
        """
        self.wait_ready()
        self._wait_for_copy()
        self._unchanged.clear()


class OffloadedTensors:
    """A set of tensors, e.g. the weights of a model, that are offloaded and reloaded together."""

    def __init__(self, device: torch.device) -> None:
        self.host = HostBuffer(page_locked=device.type == "cuda")
        self._copies = CopyStream(device)
        self.offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._offsets: dict[int, int] = {}  # offset in host memory of each storage of the last offload

    @property
    def is_offloaded(self) -> bool:
        return bool(self.offloaded)

    def offload(
        self,
        tensors: Iterable[torch.Tensor],
        unchanged: bool = False,
        before_release: Callable[[Collection[int], bool], None] = lambda storages, overwrites_host: None,
    ) -> None:
        """Copy to host memory and free the device memory; the tensors must not be used until `reload`.

        `unchanged`: they have not changed since the last reload, so that their copy in host memory is up to date.
        `before_release` is called with the storages that will be freed, and whether host memory will be overwritten.
        """
        if self.offloaded:
            raise RuntimeError("offload: these tensors are already offloaded.")
        self._copies.wait()
        storages = list(_unique_storages(tensors))
        *starts, total = accumulate((size for _, size in storages), initial=0)
        offsets = {storage._cdata: start for (storage, _), start in zip(storages, starts, strict=True)}
        copied = storages if not unchanged or offsets != self._offsets else []
        before_release(offsets, bool(copied))
        if copied:
            self.host.ensure_size(total)
        with self._copies:
            for storage, size in copied:
                self.host.store(offsets[storage._cdata], _storage_bytes(storage, size))
        self._copies.synchronize()  # memory must not be freed while it is read
        for storage, _ in storages:
            storage.resize_(0)
        self.offloaded, self._offsets = storages, offsets

    def host_offset(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset in host memory of an offloaded storage; None if it is on the device."""
        return self._offsets.get(storage._cdata) if self.offloaded else None

    def host_bytes(self, start: int, size: int) -> list[torch.Tensor]:
        """Return views of host memory, which stay valid until the next offload."""
        return self.host.parts(start, size)

    def reload(self) -> None:
        """Allocate device memory and start the copies; `wait` before the first use."""
        storages, self.offloaded = self.offloaded, []
        if not storages:
            return
        for storage, size in storages:
            storage.resize_(size)
        with self._copies:
            for storage, size in storages:
                self.host.load(self._offsets[storage._cdata], _storage_bytes(storage, size))

    def wait(self) -> None:
        """Order later work on the current stream after the started copies; the host does not wait."""
        self._copies.wait()


class OffloadedGradients:
    """Gradients whose sum over earlier micro-batches is in host memory while the next micro-batch runs.

    The sum is computed as `new + previous sum`, like autograd's accumulation on the device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self.host = HostBuffer(page_locked=device.type == "cuda")
        self._copies = CopyStream(device)
        self._offsets: list[int] = []  # of each gradient in host memory
        self.offloaded: set[int] = set()  # indices of parameters whose sum is in host memory

    def offload(self) -> None:
        """Add the offloaded sums to the new gradients, and move the result to host memory."""
        self._add_offloaded()
        self._allocate()
        gradients = {i: local_shard(p.grad) for i, p in enumerate(self._parameters) if p.grad is not None}
        with self._copies:
            for index, gradient in gradients.items():
                self.host.store(self._offsets[index], _as_bytes(gradient))
        self._copies.synchronize()
        for index in gradients:
            self._parameters[index].grad = None
        self.offloaded |= set(gradients)

    def reload(self) -> None:
        """Move the complete gradients to the device."""
        self._add_offloaded()
        for index in self.offloaded:
            parameter = self._parameters[index]
            parameter.grad = sharded_like(parameter, self._fetch(index))
        self.offloaded = set()

    def _add_offloaded(self) -> None:
        """Add the offloaded sums of the parameters that have a new gradient."""
        for index in list(self.offloaded):
            gradient = self._parameters[index].grad
            if gradient is not None:
                local_shard(gradient).add_(self._fetch(index))
                self.offloaded.remove(index)

    def _fetch(self, index: int) -> torch.Tensor:
        fetched = torch.empty_like(local_shard(self._parameters[index]))
        self.host.load(self._offsets[index], _as_bytes(fetched))
        return fetched

    def _allocate(self) -> None:
        if not self._offsets:
            sizes = [local_shard(parameter).nbytes for parameter in self._parameters]
            *self._offsets, total = accumulate(sizes, initial=0)
            self.host.ensure_size(total)


class HostBuffer:
    """Growable host memory, page-locked for copies from and to a GPU."""

    def __init__(self, page_locked: bool) -> None:
        self._page_locked = page_locked
        self.pieces: list[torch.Tensor] = []

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def ensure_size(self, size: int) -> None:
        """Ensure a size of at least `size` bytes. Growing discards the contents."""
        if self.size >= size:
            return
        if self.pieces and len(self.pieces[-1]) < PIECE_BYTES:
            self.pieces.pop()
        while self.size < size:
            length = min(PIECE_BYTES, size - self.size)
            self.pieces.append(torch.empty(length, dtype=torch.uint8, pin_memory=self._page_locked))

    def store(self, start: int, data: torch.Tensor) -> None:
        """Copy `data` into this buffer at `start`."""
        for part, data_part in self._aligned(start, data):
            part.copy_(data_part, non_blocking=True)

    def load(self, start: int, data: torch.Tensor) -> None:
        """Copy from this buffer at `start` into `data`."""
        for part, data_part in self._aligned(start, data):
            data_part.copy_(part, non_blocking=True)

    def parts(self, start: int, size: int) -> list[torch.Tensor]:
        """Return views of `size` bytes from `start` on, one per piece."""
        views, end = [], start + size
        while start < end:
            index, offset = divmod(start, PIECE_BYTES)
            length = min(PIECE_BYTES - offset, end - start)
            views.append(self.pieces[index][offset : offset + length])
            start += length
        return views

    def _aligned(self, start: int, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parts = self.parts(start, len(other))
        return zip(parts, other.split([len(part) for part in parts]), strict=True)


class CopyStream:
    """Context manager: copies inside run on a separate CUDA stream, concurrently with computation. No effect on a
    CPU."""

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
        """Make the current stream wait for the copies."""
        if self._pending and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._pending = False

    def synchronize(self) -> None:
        """Make the host wait for the copies."""
        if self._pending and self._stream is not None:
            self._stream.synchronize()
        self._pending = False


def local_shard(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, detached; a plain tensor is returned whole."""
    if isinstance(value, DTensor):
        # Detaching the shard, not the DTensor, avoids DTensor's dispatch: 46 of 75 ms of an optimizer step of a small
        # model on a CPU.
        with torch.no_grad():
            value = value.to_local()
    return value.detach()


def sharded_like(parameter: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Return a tensor with the layout of `parameter` and the shard `local`.

    `mesh`: used instead of the mesh of `parameter`; must have the same shape.
    """
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
    """Yield each non-empty storage of the local shards once, with its size."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage, storage.nbytes()


def _storage_bytes(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """Return a storage as uint8 tensor [size]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as uint8 tensor [nbytes]."""
    return tensor.view(-1).view(torch.uint8)
