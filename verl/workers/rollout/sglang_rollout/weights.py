"""Weight updates of SGLang, and the device memory of its weights and KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from verl.workers.rollout.sglang_rollout.engine_thread import EngineThread
from verl.workers.rollout.sglang_rollout.server import SGLangServer
from verl.workers.rollout.weights import CheckpointWeights

__all__ = ["ReleasableMemory", "SGLangKV", "SGLangWeights"]


class SGLangWeights(CheckpointWeights):
    """The `WeightStore` of SGLang.

    A bucket is sent as one flat tensor, by CUDA IPC or shared memory: SGLang's ranks are on this machine. From trainers
    on other machines, weights arrive by a broadcast in which each engine is one receiver. With SGLang's
    `update_weights_from_distributed`, every rank would receive the whole model.
    """

    def __init__(
        self, thread: EngineThread, skeleton: nn.Module, dtype: torch.dtype, ranks: int, memory: ReleasableMemory
    ) -> None:
        super().__init__(skeleton, dtype)
        self._thread, self._ranks, self._memory = thread, ranks, memory
        # Older versions treat every bucket as a complete update.
        self._has_update_scope = hasattr(thread.manager, "begin_weight_update")
        self._updating = False
        self._bytes = sum(tensor.numel() for tensor in skeleton.parameters()) * dtype.itemsize

    def _begin_update(self) -> None:
        self._finish_update()  # the last update may have failed
        if self._has_update_scope:
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            self._call("begin_weight_update", BeginWeightUpdateReqInput())
            self._updating = True

    def _send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=tensors)
        flat = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        # One per rank: each handle holds one reference to the shared memory.
        serialized = [MultiprocessingSerializer.serialize(flat) for _ in range(self._ranks)]
        self._call(
            "update_weights_from_tensor",
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=serialized, load_format="flattened_bucket", flush_cache=False
            ),
        )

    def _finish_update(self) -> None:
        if self._updating:
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            self._call("end_weight_update", EndWeightUpdateReqInput())
            self._updating = False

    @property
    def held_bytes(self) -> int:
        return self._bytes if self._memory.held else 0

    def offload(self) -> None:
        self._memory.release()

    def onload(self) -> None:
        self._memory.resume()

    def _call(self, method: str, request: Any) -> None:
        success, message = self._thread.call(getattr(self._thread.manager, method)(request))[:2]
        if not success:
            raise RuntimeError(f"weights: SGLang's {method} failed: {message}")


class SGLangKV:
    """The `KVStore` of SGLang."""

    def __init__(self, thread: EngineThread, server: SGLangServer, memory: ReleasableMemory, ranks: int) -> None:
        self._server, self._memory = server, memory
        usage = thread.call(thread.manager.get_internal_state())[0]["memory_usage"]
        self._bytes = int(float(usage["kvcache"]) * 2**30) * ranks

    @property
    def held_bytes(self) -> int:
        return self._bytes if self._memory.held else 0

    def release(self) -> None:
        self._server.flush_kv()
        self._memory.release()

    def restore(self) -> None:
        self._memory.resume()


class ReleasableMemory:
    """Device memory of one tag, which SGLang can release and resume; on a CPU it is never released."""

    def __init__(self, thread: EngineThread, tag: str, device: torch.device) -> None:
        self.held = True
        self._thread, self._tag = thread, tag
        self._is_releasable = device.type == "cuda"

    def release(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._is_releasable and self.held:
            request = ReleaseMemoryOccupationReqInput(tags=[self._tag])
            self._thread.call(self._thread.manager.release_memory_occupation(request))
            self.held = False

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if not self.held:
            request = ResumeMemoryOccupationReqInput(tags=[self._tag])
            self._thread.call(self._thread.manager.resume_memory_occupation(request))
            self.held = True
