"""The trainer's weights on their way into TensorRT-LLM, and the device memory of both its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from verl.types.weights import Bucket, Manifest, Wanted
from verl.workers.rollout.checkpoint_names import checkpoint_tensors
from verl.workers.rollout.received_weights import ReceivedWeights

__all__ = ["TRTLLMMemory", "TRTLLMWeights"]

Call = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs one of the engine's coroutines to its end."""

# Our tags by the names that versions of the engine have for them.
_TAGS = {"weights": ("MODEL_WEIGHTS", "MODEL_ENGINE_MAIN"), "kv_cache": ("KV_CACHE",)}


class TRTLLMWeights:
    """Hands buckets to its workers by CUDA IPC, by the names of a checkpoint, after their fingerprints were taken."""

    def __init__(self, llm: Any, call: Call, skeleton: nn.Module, dtype: torch.dtype, memory: TRTLLMMemory) -> None:
        self._llm, self._call, self._skeleton, self._memory = llm, call, skeleton, memory
        self._received = ReceivedWeights(skeleton, dtype)
        self._bytes = sum(tensor.numel() for tensor in skeleton.parameters()) * dtype.itemsize
        self._devices: dict[str, torch.device] = {}

    def check_manifest(self, manifest: Manifest | None) -> None:
        self._received.check_manifest(manifest)

    def wanted(self) -> Wanted | None:
        """Whole tensors."""
        return None

    def begin(self) -> None:
        self._received.begin()
        if not self._devices:
            self._devices = self._devices_of_workers()

    def load(self, tensors: Bucket) -> None:
        self._received.add(tensors)
        named = checkpoint_tensors(tensors, self._skeleton)
        # A worker opens memory of its own device; what is kept here lives until all of them have answered.
        kept = {
            uuid: [(name, tensor.detach().to(device).contiguous()) for name, tensor in named]
            for uuid, device in self._devices.items()
        }
        handles = {uuid: [(name, reduce_tensor(tensor)) for name, tensor in own] for uuid, own in kept.items()}
        torch.cuda.synchronize()
        self._call(self._llm.update_weights(handles))

    def verify(self, expected: Mapping[str, int]) -> None:
        self._received.verify(expected)
        self._call(self._llm.update_weights(None))  # no more will come: what had to wait is put together

    @property
    def held_bytes(self) -> int:
        return 0 if "weights" in self._memory.released else self._bytes

    def offload(self) -> None:
        self._memory.release("weights")

    def onload(self) -> None:
        self._memory.resume("weights")

    def _devices_of_workers(self) -> dict[str, torch.device]:
        """The devices of its workers, under the names by which those look for handles."""
        here, found = local_devices(), {}
        for uuid in self._call(self._llm.collective_rpc("report_device_id")):
            device = here.get(str(uuid).removeprefix("GPU-"))
            if device is None:
                raise RuntimeError(f"weights: a worker of TensorRT-LLM is on {uuid}, which is none of {sorted(here)}.")
            found[uuid] = device
        return found


class TRTLLMMemory:
    """Releases and takes back by tag; as a `KVStore`, the KV cache."""

    def __init__(self, llm: Any, call: Call) -> None:
        self._llm, self._call = llm, call
        self.released: set[str] = set()

    @property
    def held_bytes(self) -> int:
        """Not known: it takes a share of what was free."""
        return 0

    def release(self, tag: str = "kv_cache") -> None:
        if tag not in self.released:
            self._call(self._llm.release([self._name(tag)]))
            self.released.add(tag)

    def resume(self, tag: str = "kv_cache") -> None:
        if tag in self.released:
            self._call(self._llm.resume([self._name(tag)]))
            self.released.discard(tag)

    restore = resume

    def _name(self, tag: str) -> Any:
        from tensorrt_llm.llmapi import ExecutorMemoryType

        for name in _TAGS[tag]:
            if hasattr(ExecutorMemoryType, name):
                return getattr(ExecutorMemoryType, name)
        known = [member.name for member in ExecutorMemoryType]
        raise RuntimeError(f"rollout: this TensorRT-LLM has no memory tag {' or '.join(_TAGS[tag])}, only {known}.")


def local_devices() -> dict[str, torch.device]:
    """Those that this process sees, by UUID."""
    count = torch.cuda.device_count()
    return {str(torch.cuda.get_device_properties(i).uuid): torch.device("cuda", i) for i in range(count)}
