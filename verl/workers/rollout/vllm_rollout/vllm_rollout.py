"""vLLMRollout: vLLM in this process as a rollout. vLLM's engine executes the steps; our thread drives it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.build import default_end_tokens, read_hf_config
from verl.models.loading import empty_model
from verl.utils.device import resolve_dtype
from verl.utils.resources import split_cores
from verl.workers.rollout import register_rollout
from verl.workers.rollout.base import RELEASE_TAGS
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, merge_engine_arguments, request_loop
from verl.workers.rollout.vllm_rollout.step_engine import VllmStepEngine
from verl.workers.rollout.vllm_rollout.weights import WORKER_EXTENSION, SleepMode, VllmKV, VllmWeights
from verl.workers.rollout.weights import dtype_name

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
