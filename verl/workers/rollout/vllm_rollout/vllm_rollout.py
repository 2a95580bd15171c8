"""vLLMRollout: vLLM in this process as a rollout. vLLM's engine executes the steps; our thread drives it.

VllmWeights, WeightReceiver: weight updates. VllmKV, SleepMode: the device memory of vLLM's weights and KV cache.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from verl.config import ModelConfig, RolloutConfig
from verl.inference.build import default_end_tokens, read_hf_config
from verl.models.loading import empty_model
from verl.types.weights import TensorSlice, WeightMismatchError
from verl.utils.device import resolve_dtype
from verl.utils.resources import split_cores
from verl.workers.rollout import register_rollout
from verl.workers.rollout.base import RELEASE_TAGS
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, merge_engine_arguments, request_loop
from verl.workers.rollout.process.transport import BucketHandle, BufferReader, SharedBuffer
from verl.workers.rollout.vllm_rollout.step_engine import VllmStepEngine
from verl.workers.rollout.weights import CheckpointWeights, bucket_layout, dtype_name, layout_bytes

logger = logging.getLogger(__name__)

_TESTED_VERSIONS = ("0.24.0", "0.32.0")
# vLLM's argument for `return_routed_experts`: only in newer versions, and only in some of their model runners.
_EXPERTS_ARGUMENT = "enable_return_routed_experts"


@register_rollout("vllm", package="vllm", install="make setup-vllm, or pip install -e .[vllm]", reports=("drawn",))
class vLLMRollout(EmbeddedRollout):
    """vLLM's model in `dtype` on `device`. vLLM starts processes for tensor-parallel ranks."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if find_spec("vllm") is None:
            raise ImportError("vLLMRollout: vllm is not installed. Run make setup-vllm, or pip install -e .[vllm].")
        device = torch.empty(0, device=device).device
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_hf_config(model_path, model_config)
        os.environ.update(self.process_environment(config, device))
        arguments = engine_arguments(model_path, model_config, config, device, dtype)
        with _keep_random_states():
            self._engine = _start_engine(arguments)
        self._memory = SleepMode(self._engine, arguments["enable_sleep_mode"], config.free_weights)
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)
        super().__init__(
            config,
            device,
            dtype,
            loop=request_loop(VllmStepEngine(self._engine, device), model_path, model_config),
            weights=VllmWeights(self._engine, skeleton, dtype, device, self._memory),
            kv=VllmKV(self._engine, self._memory),
            eos_token_ids=default_end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
        )

    @staticmethod
    def process_environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
        variables = {
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if torch.device(device).type == "cpu":
            ranks = config.tensor_model_parallel_size
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
            # A single rank shares the cores with other processes; the ranks of one engine divide them.
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if ranks == 1 else split_cores(ranks)
        else:
            # FlashInfer's sampler ignores the seeds of requests.
            variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        unset = {name: value for name, value in variables.items() if name not in os.environ}
        # Required: our thread drives the steps, so the engine's core must be in this process.
        return unset | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        super().release(tags)
        self._memory.apply()

    def close(self) -> None:
        super().close()
        self._engine.engine_core.shutdown()


def engine_arguments(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`: the configuration's keys, then `engine_kwargs.vllm` unchanged."""
    fixed: dict[str, Any] = {
        "worker_extension_cls": WORKER_EXTENSION,
        "distributed_executor_backend": "uni" if config.tensor_model_parallel_size == 1 else "mp",
        # Log-probs of the distribution that is sampled from, at the request's temperature.
        "logprobs_mode": "processed_logprobs",
        # Only token ids are exchanged, and every request has its end tokens.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_sleep_mode": device.type == "cuda",
        **({_EXPERTS_ARGUMENT: True} if config.return_routed_experts else {}),
    }
    defaults: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": model_config.trust_remote_code,
        "hf_overrides": dict(model_config.override_config),
        "dtype": dtype_name(dtype),
        "load_format": config.load_format,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "quantization": config.quantization,
        "cudagraph_capture_sizes": config.cudagraph_capture_sizes,
        "enforce_eager": config.enforce_eager or device.type == "cpu",
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    return merge_engine_arguments("vllm", config, defaults, fixed)


def _start_engine(arguments: dict[str, Any]) -> Any:
    """Start vLLM's `LLMEngine`; ValueError for unknown arguments."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if vllm.__version__.partition("+")[0] not in _TESTED_VERSIONS:
        logger.warning(
            "rollout: vLLM %s is not among the tested versions (%s).", vllm.__version__, ", ".join(_TESTED_VERSIONS)
        )
    if _EXPERTS_ARGUMENT in arguments and _EXPERTS_ARGUMENT not in EngineArgs.__dataclass_fields__:
        raise _experts_error(vllm.__version__, "it has no such option")
    try:
        engine_args = EngineArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"engine_kwargs.vllm: {error}") from error
    try:
        return LLMEngine.from_engine_args(engine_args)
    except ValueError as error:
        if _EXPERTS_ARGUMENT in arguments and any(name in str(error) for name in ("AuxOutput", "routed-experts")):
            raise _experts_error(vllm.__version__, str(error)) from error
        raise


def _experts_error(version: str, cause: str) -> ValueError:
    return ValueError(
        f"return_routed_experts: vLLM {version} does not report routed experts here ({cause}). Set rollout.name=native,"
        " or replay the experts of the old log-probs (router_replay.mode=R2)."
    )


@contextmanager
def _keep_random_states() -> Iterator[None]:
    """Restore the global random states, which vLLM seeds; the process may be a trainer's."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


class VllmWeights(CheckpointWeights):
    """The `WeightStore` of vLLM: buckets are passed to the `WeightReceiver`s of its workers."""

    def __init__(
        self, engine: Any, skeleton: nn.Module, dtype: torch.dtype, device: torch.device, memory: SleepMode
    ) -> None:
        super().__init__(skeleton, dtype)
        self._engine, self._device, self._memory = engine, device, memory
        self._one_process = engine.vllm_config.parallel_config.world_size == 1
        self._bytes = sum(engine.collective_rpc("verl_weight_bytes"))
        self._quantized = engine.vllm_config.model_config.quantization is not None

    def _begin_update(self) -> None:
        self._engine.collective_rpc("verl_begin_update")

    def _send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._one_process:
            self._engine.collective_rpc("verl_load_weights", args=(tensors,))
            return
        # vLLM's ranks are processes, which read the bucket from shared memory.
        bucket: dict[str | TensorSlice, torch.Tensor] = {name: tensor.contiguous() for name, tensor in tensors}
        shared = SharedBuffer(layout_bytes(bucket_layout(bucket)), self._device)
        try:
            self._engine.collective_rpc("verl_load_shared", args=(shared.put(bucket),))
        finally:
            shared.close()

    def _finish_update(self) -> None:
        missing = sorted({name for names in self._engine.collective_rpc("verl_finish_update") for name in names})
        if missing and not self._quantized:  # scales are computed, not sent
            raise WeightMismatchError(
                f"weights: {len(missing)} of vLLM's weights received no value, e.g. {missing[0]!r}. vLLM uses other"
                " names for this model than transformers."
            )

    @property
    def held_bytes(self) -> int:
        return 0 if "weights" in self._memory.asleep else self._bytes

    def offload(self) -> None:
        self._memory.requested.add("weights")

    def onload(self) -> None:
        self._memory.wake("weights")


class VllmKV:
    """The `KVStore` of vLLM."""

    def __init__(self, engine: Any, memory: SleepMode) -> None:
        self._memory = memory
        self._bytes = sum(engine.collective_rpc("verl_kv_bytes"))

    @property
    def held_bytes(self) -> int:
        return 0 if "kv_cache" in self._memory.asleep else self._bytes

    def release(self) -> None:
        self._memory.requested.add("kv_cache")

    def restore(self) -> None:
        self._memory.wake("kv_cache")


class SleepMode:
    """vLLM's sleep mode, which releases all memory at once and restores it by tag. So releases are first collected in
    `requested`, then applied together."""

    def __init__(self, engine: Any, enabled: bool, discard_weights: bool) -> None:
        """`discard_weights`: weights are not copied to host memory; the next weight sync restores them."""
        self._engine, self._enabled = engine, enabled
        self._level = 2 if discard_weights else 1
        self.requested: set[str] = set()
        self.asleep: set[str] = set()

    def apply(self) -> None:
        """Release the `requested` memory. No request may run and no step may be in flight."""
        if not self._enabled or self.requested <= self.asleep:
            return
        if self.asleep:
            self._engine.wake_up(sorted(self.asleep))
        if self.requested == {"kv_cache"} and hasattr(self._engine, "release_kv_cache_memory"):  # newer than 0.24
            self._engine.sleep(level=0, mode="keep")
            self._engine.release_kv_cache_memory()
        else:
            self._engine.sleep(self._level if "weights" in self.requested else 1, mode="keep")
            kept = {"weights", "kv_cache"} - self.requested
            if kept:
                self._engine.wake_up(sorted(kept))
        self.asleep = set(self.requested)

    def wake(self, tag: str) -> None:
        self.requested.discard(tag)
        if tag in self.asleep:
            self._engine.wake_up([tag])
            self.asleep.discard(tag)


# ---------------------------------------------------------------- in vLLM's workers

WORKER_EXTENSION = f"{__name__}.WeightReceiver"


class WeightReceiver:
    """Methods that vLLM mixes into its worker class, in each of its processes. They load named tensors by vLLM's
    layerwise reload, as its weight-transfer API does.

    A layer is processed when all of its weights have arrived: repacked or quantised as at the first load, and copied to
    the memory that captured graphs read.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _verl_missing: set[str]
    _verl_updating = False

    def verl_begin_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._verl_updating:  # the last update failed: complete its layers before a new one
            self.verl_finish_update()
        self._verl_updating = True
        model = self.model_runner.get_model()
        self._verl_missing = {name for name, _ in model.named_parameters()}
        if self.device.type == "cpu":
            _reset_packed_experts(model)
        with self._verl_loading():
            initialize_layerwise_reload(model)

    def verl_load_weights(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load tensors from any device; they are only read during the call."""
        # vLLM keeps the tensors until their layer is complete.
        own = [(name, tensor.to(self.device, copy=True)) for name, tensor in tensors]
        with self._verl_loading():
            loaded = self.model_runner.get_model().load_weights(own)
        self._verl_missing -= set(loaded or ())

    def verl_load_shared(self, bucket: BucketHandle) -> None:
        """Load a bucket from shared memory. The first rank opens it and broadcasts it: every other rank would need a
        CUDA context on the first rank's device to open it."""
        from vllm.distributed.parallel_state import get_world_group

        ranks, size = get_world_group(), layout_bytes(bucket.pieces)
        with closing(BufferReader()) as reader:
            if ranks.rank_in_group == 0:
                flat = reader.open(bucket.buffer).flat[:size]
            else:
                flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            ranks.broadcast(flat, src=0)
            self.verl_load_weights([(piece.name, piece.view(flat)) for piece in bucket.pieces])
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # the next bucket overwrites the buffer

    def verl_finish_update(self) -> list[str]:
        """Finish the update; return the names of vLLM's weights that got no value."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with self._verl_loading():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.device.type == "cpu":
                _pack_tied_layers(model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._verl_updating = False
        return sorted(self._verl_missing)

    def verl_weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())

    def verl_kv_bytes(self) -> int:
        caches = tree_leaves(list(getattr(self.model_runner, "kv_caches", ())))
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
        return sum(storages.values())

    @contextmanager
    def _verl_loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.device(self.device), torch.no_grad():
            yield


# On a CPU vLLM computes with packed copies of weights. The layerwise reload does not update two kinds of them (as of
# vLLM 0.32).


def _reset_packed_experts(model: nn.Module) -> None:
    """Remove the kernels of experts, which hold packed weights: the reload creates them again."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_tied_layers(model: nn.Module) -> None:
    """Pack the weights of layers that share the parameter of another layer: the reload skips them."""
    owners: dict[int, list[Any]] = {}
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            owners.setdefault(id(layer.weight), []).append(layer)
    for layers in owners.values():
        for layer in layers[1:]:
            layer.quant_method.process_weights_after_loading(layer)
