"""Weights on their way out of an engine: whole tensors in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from verl.types.weights import TensorSpec


def bucketed(
    manifest: Mapping[str, TensorSpec],
    whole: Callable[[dict[str, torch.dtype]], dict[str, torch.Tensor]],
    dtype: torch.dtype | None,
    max_bytes: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """What `whole` gives for names and their dtypes, in the order of the manifest, as many as fit `max_bytes`.

    A tensor larger than that comes alone. Buckets depend only on the manifest: every rank cuts the same ones.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes: {max_bytes} holds no tensor. Use the size of a transfer buffer, e.g. 512 MB.")
    bucket: dict[str, torch.dtype] = {}
    filled = 0
    for name, spec in manifest.items():
        target = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        size = target.itemsize * torch.Size(spec.shape).numel()
        if bucket and filled + size > max_bytes:
            yield whole(bucket)
            bucket, filled = {}, 0
        bucket[name] = target
        filled += size
    if bucket:
        yield whole(bucket)
