"""An engine's weights: one copy, at fixed addresses for life, filled in place and compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.base import TensorSpec, WeightMismatchError

__all__ = ["EngineWeights"]


class EngineWeights:
    """Parameters and persistent buffers of an HF module, by HF name. Tied weights may come under any or all names."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._tensors: dict[str, torch.Tensor] = module.state_dict()
        self._dtype = dtype
        # Names that share memory; one of each group has to arrive.
        self._groups: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._groups.setdefault(parameter.data_ptr(), []).append(name)
        self._arrived: set[str] = set()
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def check_manifest(self, manifest: Mapping[str, TensorSpec] | None) -> None:
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
        """One cast-copy per tensor, in place."""
        for name, tensor in tensors.items():
            self._check(name, tuple(tensor.shape))
            self._tensors[name].copy_(tensor)
            self._arrived.add(name)

    def verify(self, expected: Mapping[str, int]) -> None:
        """Raise unless every weight arrived and its bits add up to the trainer's."""
        self._require_all(self._arrived, "never arrived")
        unchecked = sorted(self._arrived - set(expected))
        if unchecked:
            raise WeightMismatchError(f"weights: the trainer sent {unchecked[0]!r} without a fingerprint.")
        found = fingerprints({name: self._tensors[name] for name in expected if name in self._tensors}, self._dtype)
        wrong = [name for name, total in expected.items() if found.get(name) != total]
        if wrong:
            name = wrong[0]
            raise WeightMismatchError(
                f"weights: {name!r} differs from the trainer's (fingerprint {found.get(name)} here, {expected[name]}"
                f" there; {len(wrong)} of {len(expected)} tensors differ). The hand-over lost or changed data."
            )

    def offload(self) -> None:
        """Move the values to host memory and free the device's; tensors, views and ties stay what they are."""
        storages = [self._tensors[names[0]].untyped_storage() for names in self._groups.values()]
        for storage in {storage.data_ptr(): storage for storage in storages}.values():
            self._offloaded.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)

    def onload(self) -> None:
        """Bring them back."""
        for storage, values in self._offloaded:
            storage.resize_(values.numel())
            _bytes_of(storage).copy_(values)
        self._offloaded = []

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._tensors:
            raise WeightMismatchError(f"weights: the rollout's model has no {name!r}. Both must be the same model.")
        here = tuple(self._tensors[name].shape)
        if here != shape:
            raise WeightMismatchError(f"weights: {name!r} is {list(shape)} in the trainer and {list(here)} here.")

    def _require_all(self, names: set[str], trouble: str) -> None:
        for group in self._groups.values():
            if not names.intersection(group):
                raise WeightMismatchError(f"weights: {group[0]!r} {trouble}. The engine would mix two models.")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
