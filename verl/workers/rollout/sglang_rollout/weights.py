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

__all__ = ["Occupation", "SGLangKV", "SGLangWeights"]


class SGLangWeights:
    """Hands buckets to SGLang's ranks under the names of a checkpoint, after their fingerprints were taken.

    A bucket goes as one flat tensor, by CUDA IPC or shared memory: SGLang's ranks are on this machine. To a pool of
    other machines weights come by a broadcast in which each engine is one receiver, whatever its ranks; with SGLang's
    `update_weights_from_distributed` every rank would receive the whole model.
    """

    def __init__(
        self, thread: EngineThread, skeleton: nn.Module, dtype: torch.dtype, ranks: int, memory: Occupation
    ) -> None:
        self._thread, self._skeleton, self._ranks, self._memory = thread, skeleton, ranks, memory
        self._received = ReceivedWeights(skeleton, dtype)
        # In older versions every bucket is an update of its own.
        self._brackets = hasattr(thread.manager, "begin_weight_update")
        self._begun = False
        self._bytes = sum(tensor.numel() for tensor in skeleton.parameters()) * dtype.itemsize

    def check_manifest(self, manifest: Manifest | None) -> None:
        self._received.check_manifest(manifest)

    def wanted(self) -> Wanted | None:
        """Whole tensors."""
        return None

    def begin(self) -> None:
        self._received.begin()
        self._end()  # an update that failed half-way
        if self._brackets:
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            self._call("begin_weight_update", BeginWeightUpdateReqInput())
            self._begun = True

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
        self._received.verify(expected)
        self._end()

    def _end(self) -> None:
        if self._begun:
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            self._call("end_weight_update", EndWeightUpdateReqInput())
            self._begun = False

    @property
    def held_bytes(self) -> int:
        return self._bytes if self._memory.held else 0

    def offload(self) -> None:
        self._memory.release()

    def onload(self) -> None:
        self._memory.resume()

    def _call(self, method: str, request: Any) -> None:
        done, message = self._thread.call(getattr(self._thread.manager, method)(request))[:2]
        if not done:
            raise RuntimeError(f"weights: SGLang's {method} failed: {message}")


class SGLangKV:
    """SGLang's KV cache."""

    def __init__(self, thread: EngineThread, server: SGLangServer, memory: Occupation, ranks: int) -> None:
        self._server, self._memory = server, memory
        said = thread.call(thread.manager.get_internal_state())[0]["memory_usage"]
        self._bytes = int(float(said["kvcache"]) * 2**30) * ranks

    @property
    def held_bytes(self) -> int:
        return self._bytes if self._memory.held else 0

    def release(self) -> None:
        self._server.drop_kv()
        self._memory.release()

    def restore(self) -> None:
        self._memory.resume()


class Occupation:
    """Device memory of one kind, which SGLang gives back and takes again; on a CPU it keeps it."""

    def __init__(self, thread: EngineThread, tag: str, device: torch.device) -> None:
        self.held = True
        self._thread, self._tag = thread, tag
        self._gives_back = device.type == "cuda"

    def release(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._gives_back and self.held:
            asked = ReleaseMemoryOccupationReqInput(tags=[self._tag])
            self._thread.call(self._thread.manager.release_memory_occupation(asked))
            self.held = False

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if not self.held:
            asked = ResumeMemoryOccupationReqInput(tags=[self._tag])
            self._thread.call(self._thread.manager.resume_memory_occupation(asked))
            self.held = True
