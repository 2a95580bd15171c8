"""The trainer's weights on their way into vLLM, and the device memory of both its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from verl.types.weights import Bucket, Manifest, TensorSlice, Wanted, WeightMismatchError
from verl.workers.rollout.bucket_layout import bucket_layout, end_of
from verl.workers.rollout.checkpoint_names import checkpoint_tensors
from verl.workers.rollout.process.shared_buffer import SharedBuffer
from verl.workers.rollout.received_weights import ReceivedWeights

__all__ = ["SleepMode", "VllmKV", "VllmWeights"]


class VllmWeights:
    """Hands buckets to vLLM's workers under the names of a checkpoint, after their fingerprints were taken."""

    def __init__(
        self, engine: Any, skeleton: nn.Module, dtype: torch.dtype, device: torch.device, memory: SleepMode
    ) -> None:
        self._engine, self._skeleton, self._device, self._memory = engine, skeleton, device, memory
        self._one_process = engine.vllm_config.parallel_config.world_size == 1
        self._received = ReceivedWeights(skeleton, dtype)
        self._bytes = sum(engine.collective_rpc("verl_weight_bytes"))
        self._quantized = engine.vllm_config.model_config.quantization is not None

    def check_manifest(self, manifest: Manifest | None) -> None:
        self._received.check_manifest(manifest)

    def wanted(self) -> Wanted | None:
        """Whole tensors."""
        return None

    def begin(self) -> None:
        self._received.begin()
        self._engine.collective_rpc("verl_begin_update")

    def load(self, tensors: Bucket) -> None:
        self._received.add(tensors)
        named = checkpoint_tensors(tensors, self._skeleton)
        if self._one_process:
            self._engine.collective_rpc("verl_load_weights", args=(named,))
            return
        # vLLM's ranks are processes of their own: they read the bytes where these lie.
        bucket: dict[str | TensorSlice, torch.Tensor] = {name: tensor.contiguous() for name, tensor in named}
        shared = SharedBuffer(end_of(bucket_layout(bucket)), self._device)
        try:
            self._engine.collective_rpc("verl_load_shared", args=(shared.put(bucket),))
        finally:
            shared.close()

    def verify(self, expected: Mapping[str, int]) -> None:
        self._received.verify(expected)
        missing = sorted({name for names in self._engine.collective_rpc("verl_finish_update") for name in names})
        if missing and not self._quantized:  # scales are made, not sent
            raise WeightMismatchError(
                f"weights: vLLM's {missing[0]!r} got no value ({len(missing)} did not). vLLM knows this model under"
                " other names than transformers."
            )

    @property
    def held_bytes(self) -> int:
        return 0 if "weights" in self._memory.asleep else self._bytes

    def offload(self) -> None:
        self._memory.wanted.add("weights")

    def onload(self) -> None:
        self._memory.wake("weights")


class VllmKV:
    """vLLM's KV cache."""

    def __init__(self, engine: Any, memory: SleepMode) -> None:
        self._memory = memory
        self._bytes = sum(engine.collective_rpc("verl_kv_bytes"))

    @property
    def held_bytes(self) -> int:
        return 0 if "kv_cache" in self._memory.asleep else self._bytes

    def release(self) -> None:
        self._memory.wanted.add("kv_cache")

    def restore(self) -> None:
        self._memory.wake("kv_cache")


class SleepMode:
    """vLLM falls asleep as a whole and wakes by tag: what is to sleep is said first, and then it does at once."""

    def __init__(self, engine: Any, enabled: bool, discard_weights: bool) -> None:
        """`discard_weights`: no copy waits in host memory; the next hand-over brings them."""
        self._engine, self._enabled = engine, enabled
        self._level = 2 if discard_weights else 1
        self.wanted: set[str] = set()
        self.asleep: set[str] = set()

    def settle(self) -> None:
        """Give back what is `wanted` asleep. Nothing may be running or in flight."""
        if not self._enabled or self.wanted <= self.asleep:
            return
        if self.asleep:
            self._engine.wake_up(sorted(self.asleep))
        if self.wanted == {"kv_cache"} and hasattr(self._engine, "release_kv_cache_memory"):  # newer than 0.24
            self._engine.sleep(level=0, mode="keep")
            self._engine.release_kv_cache_memory()
        else:
            self._engine.sleep(self._level if "weights" in self.wanted else 1, mode="keep")
            stays = {"weights", "kv_cache"} - self.wanted
            if stays:
                self._engine.wake_up(sorted(stays))
        self.asleep = set(self.wanted)

    def wake(self, tag: str) -> None:
        self.wanted.discard(tag)
        if tag in self.asleep:
            self._engine.wake_up([tag])
            self.asleep.discard(tag)
