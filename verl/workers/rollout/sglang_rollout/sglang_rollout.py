"""SGLangRollout: SGLang as a rollout. SGLang's processes compute and sample; our thread drives its engine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from verl.config import ModelConfig, RolloutConfig
from verl.inference.build import default_end_tokens, read_hf_config
from verl.models.loading import empty_model
from verl.utils.device import resolve_dtype
from verl.utils.resources import split_cores
from verl.workers.rollout import register_rollout
from verl.workers.rollout.base import RELEASE_TAGS
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, merge_engine_arguments, request_loop
from verl.workers.rollout.sglang_rollout.server import EngineThread, SGLangServer, SGLangStepEngine
from verl.workers.rollout.weights import CheckpointWeights, dtype_name


@register_rollout(
    "sglang", package="sglang", install="make setup-sglang, or pip install -e .[sglang]", reports=("full",)
)
class SGLangRollout(EmbeddedRollout):
    """An engine in `dtype` on `device` and, with several ranks, the following devices. SGLang starts its processes."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if find_spec("sglang") is None:
            raise ImportError(
                "SGLangRollout: sglang is not installed. Run make setup-sglang, or pip install -e .[sglang]."
            )
        device = torch.empty(0, device=device).device
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_hf_config(model_path, model_config)
        os.environ.update(self.process_environment(config, device))
        thread = EngineThread(engine_arguments(model_path, model_config, config, device, dtype))
        ranks = config.tensor_model_parallel_size
        text_config = hf_config.get_text_config(decoder=True)
        eos_token_ids = default_end_tokens(model_path, hf_config, model_config).ids
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)
        self.step_engine = SGLangStepEngine(thread, eos_token_ids, config.max_model_len, text_config.vocab_size, dtype)
        super().__init__(
            config,
            device,
            dtype,
            loop=request_loop(self.step_engine, model_path, model_config),
            weights=SGLangWeights(thread, skeleton, dtype, ranks, ReleasableMemory(thread, "weights", device)),
            kv=SGLangKV(thread, self.step_engine.server, ReleasableMemory(thread, "kv_cache", device), ranks),
            eos_token_ids=eos_token_ids,
            pad_token_id=text_config.pad_token_id,
        )

    @staticmethod
    def process_environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
        variables = {
            # Log-probs at the request's temperature, not at 1.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        }
        if torch.device(device).type == "cpu":
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            if config.tensor_model_parallel_size > 1:
                variables["SGLANG_CPU_OMP_THREADS_BIND"] = split_cores(config.tensor_model_parallel_size)
        return {name: value for name, value in variables.items() if name not in os.environ}

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """SGLang releases memory only while no request runs: unfinished requests restart from their tokens."""
        if "kv_cache" not in tags:
            self.loop.halt("release")
            self.loop.invalidate_kv_cache()
            self.step_engine.server.flush_kv()
        super().release(tags)

    def close(self) -> None:
        super().close()
        self.step_engine.close()


def engine_arguments(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of SGLang's `Engine`: the configuration's keys, then `engine_kwargs.sglang` unchanged."""
    fixed: dict[str, Any] = {
        # Only token ids are exchanged. Every token is reported when it was sampled, otherwise a pause would miss some.
        "skip_tokenizer_init": True,
        "stream_interval": 1,
        "incremental_streaming_output": True,
        "enable_memory_saver": device.type == "cuda",
    }
    defaults: dict[str, Any] = {
        "model_path": model_path,
        "trust_remote_code": model_config.trust_remote_code,
        "json_model_override_args": json.dumps(dict(model_config.override_config)),
        "dtype": dtype_name(dtype),
        "quantization": config.quantization,
        "load_format": config.load_format,
        "random_seed": config.seed,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_model_parallel_size,
        "ep_size": config.expert_parallel_size,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager or device.type == "cpu",
        "sampling_defaults": "openai",
        "log_level": "error",
        "grammar_backend": "none",
    }
    defaults |= _cuda_arguments(config, device) if device.type == "cuda" else _CPU_ARGUMENTS
    return merge_engine_arguments("sglang", config, defaults, fixed)


_CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
}


def _cuda_arguments(config: RolloutConfig, device: torch.device) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "device": "cuda",
        "base_gpu_id": device.index or 0,
        # Without a backup, released weights are lost.
        "enable_weights_cpu_backup": not config.free_weights,
    }
    if config.cudagraph_capture_sizes is not None:
        arguments["cuda_graph_bs_decode"] = config.cudagraph_capture_sizes
    return arguments


# ---------------------------------------------------------------- weights


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
