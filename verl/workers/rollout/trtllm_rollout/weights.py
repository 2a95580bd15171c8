"""Weight updates of TensorRT-LLM, and the device memory of its weights and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from verl.workers.rollout.weights import CheckpointWeights

__all__ = ["TRTLLMMemory", "TRTLLMWeights"]

RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine of the engine and returns its result."""

# The engine's names of our memory tags, in different versions.
_TAGS = {"weights": ("MODEL_WEIGHTS", "MODEL_ENGINE_MAIN"), "kv_cache": ("KV_CACHE",)}


class TRTLLMWeights(CheckpointWeights):
    """The `WeightStore` of TensorRT-LLM: buckets are passed to its workers by CUDA IPC."""

    def __init__(
        self, llm: Any, call: RunCoroutine, skeleton: nn.Module, dtype: torch.dtype, memory: TRTLLMMemory
    ) -> None:
        super().__init__(skeleton, dtype)
        self._llm, self._call, self._memory = llm, call, memory
        self._bytes = sum(tensor.numel() for tensor in skeleton.parameters()) * dtype.itemsize
        self._devices: dict[str, torch.device] = {}
        """The devices of its workers, by the ids with which the workers look up handles."""

    def _begin_update(self) -> None:
        if not self._devices:
            self._devices = self._devices_of_workers()

    def _send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        # A worker opens memory of its own device. The copies must live until all workers have replied.
        copies = {
            uuid: [(name, tensor.detach().to(device).contiguous()) for name, tensor in tensors]
            for uuid, device in self._devices.items()
        }
        handles = {uuid: [(name, reduce_tensor(tensor)) for name, tensor in own] for uuid, own in copies.items()}
        torch.cuda.synchronize()
        self._call(self._llm.update_weights(handles))

    def _finish_update(self) -> None:
        self._call(self._llm.update_weights(None))  # ends the update: incomplete layers are processed

    @property
    def held_bytes(self) -> int:
        return 0 if "weights" in self._memory.released else self._bytes

    def offload(self) -> None:
        self._memory.release("weights")

    def onload(self) -> None:
        self._memory.restore("weights")

    def _devices_of_workers(self) -> dict[str, torch.device]:
        local, devices = local_devices(), {}
        for uuid in self._call(self._llm.collective_rpc("report_device_id")):
            device = local.get(str(uuid).removeprefix("GPU-"))
            if device is None:
                raise RuntimeError(
                    f"weights: a worker of TensorRT-LLM is on {uuid}, which is not a device of this process:"
                    f" {sorted(local)}."
                )
            devices[uuid] = device
        return devices


class TRTLLMMemory:
    """Releases and restores device memory by tag; with the default tag, the `KVStore` of TensorRT-LLM."""

    held_bytes = 0
    """Unknown: the KV cache takes a share of the free memory."""

    def __init__(self, llm: Any, call: RunCoroutine) -> None:
        self._llm, self._call = llm, call
        self.released: set[str] = set()

    def release(self, tag: str = "kv_cache") -> None:
        if tag not in self.released:
            self._call(self._llm.release([self._memory_type(tag)]))
            self.released.add(tag)

    def restore(self, tag: str = "kv_cache") -> None:
        if tag in self.released:
            self._call(self._llm.resume([self._memory_type(tag)]))
            self.released.discard(tag)

    def _memory_type(self, tag: str) -> Any:
        from tensorrt_llm.llmapi import ExecutorMemoryType

        for name in _TAGS[tag]:
            if hasattr(ExecutorMemoryType, name):
                return getattr(ExecutorMemoryType, name)
        known = [member.name for member in ExecutorMemoryType]
        raise RuntimeError(f"rollout: this TensorRT-LLM has no memory tag {' or '.join(_TAGS[tag])}, only {known}.")


def local_devices() -> dict[str, torch.device]:
    """The devices of this process by UUID."""
    count = torch.cuda.device_count()
    return {str(torch.cuda.get_device_properties(i).uuid): torch.device("cuda", i) for i in range(count)}
