"""Source of a weight sync without a training engine."""

from __future__ import annotations

import torch


class UnshardedModel:
    """The weight-export methods of a training engine, for an unsharded model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = model.state_dict()
        self.buckets_sent = 0

    def manifest(self):
        return self.weights

    def buckets(self, dtype, max_bytes, requested=None):
        bucket, size = {}, 0
        for name, tensor in self.weights.items():
            tensor = tensor.to(dtype)
            if bucket and size + tensor.nbytes > max_bytes:
                self.buckets_sent += 1
                yield bucket
                bucket, size = {}, 0
            bucket[name], size = tensor, size + tensor.nbytes
        self.buckets_sent += 1
        yield bucket
