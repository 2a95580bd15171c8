"""The trainer's weights on their way into SGLang, and the device memory of both its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from verl.types.weights import Bucket, Manifest, Wanted
from verl.workers.rollout.checkpoint_names import checkpoint_tensors
from verl.workers.rollout.received_weights import ReceivedWeights
from verl.workers.rollout.sglang_rollout.engine_thread import EngineThread
from verl.workers.rollout.sglang_rollout.server import SGLangServer

__all__ = ["SGLangKV", "SGLangWeights"]


class SGLangWeights:
    """Hands buckets to SGLang's ranks under the names of a checkpoint, after their fingerprints were taken.

    A bucket goes as one flat tensor, by CUDA IPC or shared memory: SGLang's ranks are on this machine. To a pool of
    other machines weights come by a broadcast in which each engine is one receiver, whatever its ranks; with SGLang's
    `update_weights_from_distributed` every rank would receive the whole model.
    """

    def __init__(self, thread: EngineThread, skeleton: nn.Module, dtype: torch.dtype, ranks: int) -> None:
        self._thread, self._skeleton, self._ranks = thread, skeleton, ranks
        self._received = ReceivedWeights(skeleton, dtype)
        self._bytes = sum(tensor.numel() for tensor in skeleton.parameters()) * dtype.itemsize
        self._held = True

    def check_manifest(self, manifest: Manifest | None) -> None:
        self._received.check_manifest(manifest)

    def wanted(self) -> Wanted | None:
        """Whole tensors."""
        return None

    def begin(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._received.begin()
        self._call("begin_weight_update", BeginWeightUpdateReqInput())

    def load(self, tensors: Bucket) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        self._received.add(tensors)
        bucket = FlattenedTensorBucket(named_tensors=checkpoint_tensors(tensors, self._skeleton))
        flat = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        # One for each rank: what is shared is counted by who opens it.
        shared = [MultiprocessingSerializer.serialize(flat) for _ in range(self._ranks)]
        self._call(
            "update_weights_from_tensor",
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=shared, load_format="flattened_bucket", flush_cache=False
            ),
        )

    def verify(self, expected: Mapping[str, int]) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._received.verify(expected)
        self._call("end_weight_update", EndWeightUpdateReqInput())

    @property
    def held_bytes(self) -> int:
        return self._bytes if self._held else 0

    def offload(self) -> None:
        _occupy(self._thread, "release", "weights")
        self._held = False

    def onload(self) -> None:
        if not self._held:
            _occupy(self._thread, "resume", "weights")
            self._held = True

    def _call(self, method: str, request: Any) -> None:
        done, message = self._thread.call(getattr(self._thread.manager, method)(request))[:2]
        if not done:
            raise RuntimeError(f"weights: SGLang's {method} failed: {message}")


class SGLangKV:
    """SGLang's KV cache."""

    def __init__(self, thread: EngineThread, server: SGLangServer, device: torch.device) -> None:
        self._thread, self._server = thread, server
        self._gives_back = device.type == "cuda"
        self._held = True

    @property
    def held_bytes(self) -> int:
        return 0

    def release(self) -> None:
        self._server.drop_kv()
        if self._gives_back:
            _occupy(self._thread, "release", "kv_cache")
            self._held = False

    def restore(self) -> None:
        if not self._held:
            _occupy(self._thread, "resume", "kv_cache")
            self._held = True


def _occupy(thread: EngineThread, what: str, tag: str) -> None:
    from sglang.srt.managers import io_struct

    request = getattr(io_struct, f"{what.capitalize()}MemoryOccupationReqInput")(tags=[tag])
    thread.call(getattr(thread.manager, f"{what}_memory_occupation")(request))
