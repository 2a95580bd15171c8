"""TRTLLMRollout: TensorRT-LLM as a rollout. Its workers compute and sample; our thread drives its engine.

Written against its documented LLM API (`AsyncLLM`, PyTorch backend, Ray orchestrator). It has never been run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.config.names import rollout_traits
from verl.inference.async_engine import AsyncEngine
from verl.inference.build import end_tokens, read_hf_config
from verl.models.loading import empty_model
from verl.types.request import Output, Request
from verl.utils.device import resolve_dtype
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout import register_rollout
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, merge_engine_arguments
from verl.workers.rollout.server_step_engine import OnChunks
from verl.workers.rollout.streaming_server import RestartingStepEngine, StreamingServer
from verl.workers.rollout.third_party_tokens import check_reported_log_probs
from verl.workers.rollout.trtllm_rollout.source import TRTLLMSource
from verl.workers.rollout.trtllm_rollout.weights import TRTLLMMemory, TRTLLMWeights
from verl.workers.rollout.weights import dtype_name

__all__ = ["TRTLLMRollout", "engine_arguments"]

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0


@register_rollout("trtllm", package="tensorrt_llm", install="pip install tensorrt-llm", reports=("drawn",))
class TRTLLMRollout(EmbeddedRollout):
    """An engine in `dtype` on the devices of this process; its workers are Ray actors that it starts."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        if find_spec("tensorrt_llm") is None:
            raise ImportError(f"TRTLLMRollout: tensorrt_llm is not installed. Run {rollout_traits('trtllm').install}.")
        device = torch.device(device)
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_hf_config(model_path, model_config)
        os.environ.update(self.process_environment(config, device))
        import tensorrt_llm
        from tensorrt_llm.llmapi import AsyncLLM

        logger.warning("rollout: TensorRT-LLM %s: no version of it has been tested.", tensorrt_llm.__version__)
        self._llm = AsyncLLM(**engine_arguments(model_path, model_config, config, dtype))
        text_config = hf_config.get_text_config(decoder=True)
        self._vocab_size, self._log_probs_checked = int(text_config.vocab_size), False
        self._source = TRTLLMSource(self._llm, config.max_num_seqs, self._vocab_size)
        self._step_engine = RestartingStepEngine(self._connect, config.max_model_len, after_truncation=True)
        call = self._streams.call
        call(self._llm.setup_async())
        memory = TRTLLMMemory(self._llm, call)
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)
        super().__init__(
            config,
            device,
            dtype,
            loop=AsyncEngine(
                self._step_engine, partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code)
            ),
            weights=TRTLLMWeights(self._llm, call, skeleton, dtype, memory),
            kv=memory,
            eos_token_ids=end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=text_config.pad_token_id,
        )

    def _connect(self, on_chunks: OnChunks) -> StreamingServer:
        self._streams = StreamingServer(self._source, on_chunks)
        return self._streams

    @staticmethod
    def process_environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
        variables = {
            "TLLM_LOG_LEVEL": "ERROR",
            # Its workers are Ray actors: they must see the devices of this process, not those that Ray assigns.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
        return {name: value for name, value in variables.items() if name not in os.environ}

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        self._require_ready()
        if not self._log_probs_checked:
            import tensorrt_llm

            self._log_probs_checked = check_reported_log_probs(
                f"TensorRT-LLM {tensorrt_llm.__version__}",
                lambda temperature, top_k: self._streams.call(self._source.top_log_probs(temperature, top_k)),
                self._vocab_size,
                after_truncation=True,
                dtype=self.weight_dtype,
            )
        return super().submit(requests)

    def watch_processes(self, on_end: Callable[[str], None]) -> None:
        watch_actors(on_end)

    def close(self) -> None:
        super().close()
        self._step_engine.close()


def engine_arguments(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of `AsyncLLM`, which rejects unknown ones: the configuration's keys, then `engine_kwargs.trtllm`
    unchanged."""
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, SleepConfig

    graphs = {} if config.cudagraph_capture_sizes is None else {"batch_sizes": list(config.cudagraph_capture_sizes)}
    fixed: dict[str, Any] = {
        # Only token ids are exchanged. Every token is reported when it was sampled, otherwise a pause would miss some.
        "skip_tokenizer_init": True,
        "stream_interval": 1,
    }
    defaults: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": model_config.trust_remote_code,
        "model_kwargs": dict(model_config.override_config) or None,
        "dtype": dtype_name(dtype),
        "load_format": config.load_format,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_seq_len": config.max_model_len,
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "kv_cache_config": KvCacheConfig(
            enable_block_reuse=config.enable_prefix_caching, free_gpu_memory_fraction=config.gpu_memory_utilization
        ),
        "cuda_graph_config": None if config.enforce_eager else CudaGraphConfig(**graphs),
        "sleep_config": SleepConfig(),
        # Its own all-reduce relies on the order of the devices, which ranks of other replicas share.
        "allreduce_strategy": "NCCL",
    }
    return merge_engine_arguments("trtllm", config, defaults, fixed)


def watch_actors(on_end: Callable[[str], None]) -> None:
    """Call `on_end` in a background thread when the first of the Ray actors that this driver has started so far ends.
    TensorRT-LLM's calls do not fail when an actor dies."""
    import ray

    actors = ray._private.state.actors  # the documented list of actors needs Ray's dashboard
    job = ray.get_runtime_context().get_job_id()
    workers = [name for name, actor in actors().items() if actor["JobID"] == job and actor["State"] == "ALIVE"]

    def run() -> None:
        while ray.is_initialized():
            for worker in map(actors, workers):
                if worker["State"] != "ALIVE":
                    on_end(f"process {worker['Pid']} (Ray actor {worker['ActorClassName']}) has ended")
                    return
            threading.Event().wait(_POLL_INTERVAL_S)

    threading.Thread(target=run, name="watch-actors", daemon=True).start()
