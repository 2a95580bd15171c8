"""An engine's weights: one copy, at fixed addresses for life, filled in place and compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from verl.inference.memory import Region
from verl.inference.tensor_parallel import SINGLE, TensorParallel
from verl.types.weights import Manifest, WeightMismatchError
from verl.utils.weight_fingerprint import Place, fingerprints

__all__ = ["EngineWeights", "Shard", "pack_module"]

# Every tensor starts where vector loads like it.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that is on this rank: `length` of `full` entries of dimension `dim`, from `start` on."""

    dim: int
    start: int
    length: int
    full: int
    counted: bool = True
    """Whether this rank's copy enters the fingerprint; a part that several ranks hold is counted by one of them."""


class EngineWeights:
    """Tensors by HF name, all of them in one region. Tied weights may come under any or all of their names.

    On a tensor-parallel rank `shards` says of which tensors only a part is here; whole ones come in, parts are kept.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        region: Region,
        dtype: torch.dtype,
        shards: Mapping[str, Shard] | None = None,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        self._tensors = dict(tensors)
        self._region = region
        self._dtype = dtype
        self._shards = dict(shards or {})
        self._parallel = parallel
        # Names that share memory; one of each group has to arrive.
        self._groups: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._groups.setdefault(tensor.data_ptr(), []).append(name)
        self._arrived: set[str] = set()
        self._host_copy: torch.Tensor | None = None
        self._offloaded = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by HF name, at their addresses."""
        return dict(self._tensors)

    # ---------------------------------------------------------------- updates

    def check_manifest(self, manifest: Manifest | None) -> None:
        """Refuse a trainer whose model is another one, before anything is overwritten."""
        if manifest is None:
            return
        for name, spec in manifest.items():
            self._check(name, tuple(spec.shape))
        self._require_all(set(manifest), "is not in the trainer's manifest")

    def begin(self) -> None:
        self._arrived = set()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """One cast-copy of all of them, in place."""
        for name, tensor in tensors.items():
            self._check(name, tuple(tensor.shape))
        if tensors:
            parts = [self._part(name, tensor) for name, tensor in tensors.items()]
            torch._foreach_copy_([self._tensors[name] for name in tensors], parts)
        self._arrived.update(tensors)

    def verify(self, expected: Mapping[str, int]) -> None:
        """Raise unless every weight arrived and has the trainer's bits, each in its place."""
        self._require_all(self._arrived, "never arrived")
        unchecked = sorted(self._arrived - set(expected))
        if unchecked:
            raise WeightMismatchError(f"weights: the trainer sent {unchecked[0]!r} without a fingerprint.")
        found = self._fingerprints([name for name in expected if name in self._tensors])
        wrong = [name for name, total in expected.items() if found.get(name) != total]
        if wrong:
            name = wrong[0]
            raise WeightMismatchError(
                f"weights: {name!r} differs from the trainer's (fingerprint {found.get(name)} here, {expected[name]}"
                f" there; {len(wrong)} of {len(expected)} tensors differ). The hand-over lost or changed data."
            )

    # ---------------------------------------------------------------- memory

    @property
    def held_bytes(self) -> int:
        """Memory of the device that they take now."""
        return self._region.size if self._region.held else 0

    def offload(self) -> None:
        """Keep the values in host memory and free the device's; tensors, views and ties stay what they are."""
        if not self._region.held:
            return
        if self._host_copy is None:
            pinned = self._region.device.type == "cuda"
            self._host_copy = torch.empty(self._region.size, dtype=torch.uint8, pin_memory=pinned)
        self._host_copy.copy_(self._region.bytes)
        self._offloaded = True
        self._region.release()

    def drop(self) -> None:
        """Free the memory and forget the values."""
        self._offloaded = False
        self._host_copy = None
        self._region.release()

    def onload(self) -> None:
        """Take the memory again, and the values unless they were dropped."""
        self._region.restore()
        if self._offloaded and self._host_copy is not None:
            self._region.bytes.copy_(self._host_copy)
            self._offloaded = False

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._tensors:
            raise WeightMismatchError(f"weights: the rollout's model has no {name!r}. Both must be the same model.")
        here = tuple(self._tensors[name].shape)
        if name in self._shards:
            shard = self._shards[name]
            here = (*here[: shard.dim], shard.full, *here[shard.dim + 1 :])
        if here != shape:
            raise WeightMismatchError(f"weights: {name!r} is {list(shape)} in the trainer and {list(here)} here.")

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        shard = self._shards.get(name)
        return tensor if shard is None else tensor.narrow(shard.dim, shard.start, shard.length)

    def _fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Of the whole tensors: parts, each at its place, add up over the ranks that share the model."""
        places = {
            name: Place.of_part(self._tensors[name].shape, shard.dim, shard.start, shard.full)
            for name, shard in self._shards.items()
        }
        here = fingerprints({name: self._tensors[name] for name in names}, self._dtype, places)
        if self._parallel.size == 1:
            return here
        first = self._parallel.rank == 0
        counted = {name: self._shards[name].counted if name in self._shards else first for name in names}
        sums = torch.tensor([here[name] if counted[name] else 0 for name in names], dtype=torch.int64)
        dist.all_reduce(sums, group=self._parallel.meeting)
        return dict(zip(names, sums.tolist(), strict=True))

    def _require_all(self, names: set[str], trouble: str) -> None:
        for group in self._groups.values():
            if not names.intersection(group):
                raise WeightMismatchError(f"weights: {group[0]!r} {trouble}. The engine would mix two models.")


def pack_module(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> Region:
    """Move a module to `device`, its weights into one region and into `dtype`; ties stay ties.

    Buffers that are no weights (the frequencies of a rotary embedding) keep their precision.
    """
    weights = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    dtypes = {key: dtype if tensor.is_floating_point() else tensor.dtype for key, tensor in weights.items()}
    starts, size = {}, 0
    for key, tensor in weights.items():
        starts[key] = size
        size += -(-tensor.numel() * dtypes[key].itemsize // _ALIGNMENT) * _ALIGNMENT
    region = Region(size, device)
    for key, tensor in weights.items():
        end = starts[key] + tensor.numel() * dtypes[key].itemsize
        place = region.bytes[starts[key] : end].view(dtypes[key]).view(tensor.shape)
        place.copy_(tensor.detach())
        tensor.data = place
    for buffer in module.buffers():
        if id(buffer) not in weights:
            buffer.data = buffer.data.to(device)
    return region
