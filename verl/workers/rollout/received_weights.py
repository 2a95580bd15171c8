"""What an engine of other make was sent of the trainer's weights: all of them, bit for bit, or an error.

Such an engine merges, splits and repacks: its own tensors cannot be compared with the trainer's, what it was given can.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from verl.types.weights import Bucket, Manifest, WeightMismatchError
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.checkpoint_names import tied_names

__all__ = ["ReceivedWeights"]


class ReceivedWeights:
    """Whole tensors by HF name. Tied weights may come under any or all of their names, if they are the same."""

    def __init__(self, skeleton: nn.Module, dtype: torch.dtype) -> None:
        """`skeleton`: the model on the meta device, as transformers builds it. Fingerprints are taken in `dtype`."""
        self._shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
        self._first = tied_names(skeleton)
        self._dtype = dtype
        self._found: dict[str, int] = {}

    def check_manifest(self, manifest: Manifest | None) -> None:
        """Refuse a trainer whose model is another one, before anything is overwritten."""
        if manifest is not None:
            for name, spec in manifest.items():
                self._check(name, tuple(spec.shape))
            self._require_all(set(manifest), "is not in the trainer's manifest")

    def begin(self) -> None:
        self._found = {}

    def add(self, bucket: Bucket) -> None:
        """These came."""
        for key, tensor in bucket.items():
            if not isinstance(key, str):
                raise WeightMismatchError(f"weights: rows of {key.name!r} came; this engine takes whole tensors.")
            self._check(key, tuple(tensor.shape))
        self._found.update({str(key): total for key, total in fingerprints(bucket, self._dtype).items()})

    def verify(self, expected: Mapping[str, int]) -> None:
        """Raise unless every weight came and has the trainer's bits."""
        self._require_all(set(self._found), "never arrived")
        unchecked = sorted(set(self._found) - set(expected))
        if unchecked:
            raise WeightMismatchError(f"weights: the trainer sent {unchecked[0]!r} without a fingerprint.")
        wrong = [name for name, total in expected.items() if self._found.get(name) != total]
        wrong += [name for name, total in self._found.items() if self._found.get(self._first[name], total) != total]
        if wrong:
            name = wrong[0]
            raise WeightMismatchError(
                f"weights: {name!r} differs from the trainer's (fingerprint {self._found.get(name)} here,"
                f" {expected[name]} there; {len(wrong)} of {len(expected)} tensors differ). The hand-over lost or"
                " changed data, or the trainer does not tie what the rollout ties."
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._shapes:
            raise WeightMismatchError(f"weights: the rollout's model has no {name!r}. Both must be the same model.")
        if self._shapes[name] != shape:
            here = list(self._shapes[name])
            raise WeightMismatchError(f"weights: {name!r} is {list(shape)} in the trainer and {here} here.")

    def _require_all(self, names: set[str], trouble: str) -> None:
        there = {self._first[name] for name in names}
        for name in self._shapes:
            if self._first[name] not in there:
                raise WeightMismatchError(f"weights: {name!r} {trouble}. The engine would mix two models.")
