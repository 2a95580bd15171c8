"""TRTLLMRollout: TensorRT-LLM as a rollout. Its workers compute and sample; this process sends requests and weights.

Written against the documented LLM API (`AsyncLLM`, PyTorch backend, Ray orchestrator). It has never been run with
TensorRT-LLM, only with a fake of this API.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from verl.config import ModelConfig, RolloutConfig
from verl.config.names import rollout_traits
from verl.inference.build import default_end_tokens, read_hf_config
from verl.inference.sequence import Sequence as TokenSequence
from verl.models.loading import empty_model
from verl.types.request import Output, Request
from verl.utils.counter_noise import engine_seed
from verl.utils.device import resolve_dtype
from verl.workers.rollout import register_rollout
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, merge_engine_arguments, request_loop
from verl.workers.rollout.streaming_server import ResendingStepEngine, StreamEvent, StreamingServer, params_after
from verl.workers.rollout.third_party import PROBE_PROMPT, PROBE_TOP_TOKENS, OnChunks, check_reported_log_probs
from verl.workers.rollout.weights import CheckpointWeights, dtype_name

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0


@register_rollout("trtllm", package="tensorrt_llm", install="pip install tensorrt-llm", reports=("drawn",))
class TRTLLMRollout(EmbeddedRollout):
    """An engine in `dtype` on the devices of this process. TensorRT-LLM starts its workers as Ray actors."""

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
        self._step_engine = ResendingStepEngine(self._connect, config.max_model_len, log_probs_after_filtering=True)
        call = self._streams.call
        call(self._llm.setup_async())
        memory = TRTLLMMemory(self._llm, call)
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)
        super().__init__(
            config,
            device,
            dtype,
            loop=request_loop(self._step_engine, model_path, model_config),
            weights=TRTLLMWeights(self._llm, call, skeleton, dtype, memory),
            kv=memory,
            eos_token_ids=default_end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=text_config.pad_token_id,
        )

    def _connect(self, on_chunks: OnChunks) -> StreamingServer:
        self._streams = StreamingServer(self._source, on_chunks)
        return self._streams

    @staticmethod
    def process_environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
        variables = {
            "TLLM_LOG_LEVEL": "ERROR",
            # The workers (Ray actors) must see the devices of this process, not those that Ray assigns.
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
                log_probs_after_filtering=True,
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
        # TensorRT-LLM's own all-reduce relies on the order of the devices, which other replicas share.
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


# ---------------------------------------------------------------- tokens

# An id that no token has. End tokens are passed as `stop_token_ids`, which the engine reports, not as `end_id`.
_NO_TOKEN = -1


class TRTLLMSource:
    """TensorRT-LLM's `AsyncLLM` as a `TokenSource`; its coroutines run in the event loop of the streams. A pause aborts
    running requests, which are sent again afterwards."""

    engine = "TensorRT-LLM"
    log = "the output of the rollout process and of its Ray actors"

    def __init__(self, llm: Any, max_sequences: int, vocab_size: int) -> None:
        """`llm`: an `AsyncLLM`."""
        self.max_streams = 2 * max_sequences
        self._llm, self._vocab_size = llm, vocab_size
        self._running: set[Any] = set()
        self._cache_salt = 0
        """Namespace of the prefix cache."""

    def build_request(self, sequence: TokenSequence) -> tuple[list[int], dict[str, Any]]:
        return list(sequence.token_ids), sampling_arguments(sequence, self._vocab_size)

    async def stream(
        self, request: tuple[list[int], dict[str, Any]], generated: list[int]
    ) -> AsyncGenerator[StreamEvent | None, None]:
        prompt, arguments = request
        yield None
        result = self._llm.generate_async(
            {"prompt_token_ids": prompt + generated},
            _sampling_params(params_after(arguments, len(generated))),
            streaming=True,
            cache_salt=str(self._cache_salt),
        )
        self._running.add(result)
        received = 0
        try:
            async for output in result:
                completion = output.outputs[0]
                # `completion` has all tokens so far.
                tokens, entries = completion.token_ids[received:], (completion.logprobs or [])[received:]
                received = len(completion.token_ids)
                log_probs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
                reason = completion.finish_reason
                yield list(tokens), log_probs, "abort" if reason == "cancelled" else reason
        finally:
            self._running.discard(result)
            if not result.finished:
                result.abort()

    def pause(self) -> None:
        for result in list(self._running):
            result.abort()

    def resume(self) -> None: ...

    def reset_prefix_cache(self) -> None:
        self._cache_salt += 1

    async def top_log_probs(self, temperature: float, top_k: int) -> Mapping[int, float]:
        """Log-probs of the most likely tokens after `PROBE_PROMPT`."""
        arguments = {"temperature": temperature, "top_k": max(0, top_k), "max_tokens": 1, "end_id": _NO_TOKEN}
        params = _sampling_params(arguments)
        params.logprobs = PROBE_TOP_TOKENS
        output = await self._llm.generate_async({"prompt_token_ids": list(PROBE_PROMPT)}, params)
        (log_probs,) = output.outputs[0].logprobs
        return {token: entry.logprob for token, entry in log_probs.items()}

    async def close(self) -> None:
        self._llm.shutdown()


def sampling_arguments(sequence: TokenSequence, vocab_size: int) -> dict[str, Any]:
    """Arguments of `SamplingParams` that continue a sequence from its tokens to its end."""
    params, generated = sequence.params, len(sequence.output.token_ids)
    if params.greedy:
        sampling: dict[str, Any] = {"temperature": 0.0, "top_k": 1}
    else:
        sampling = {
            "temperature": params.temperature,
            "top_k": max(0, params.top_k),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": engine_seed(params.key, generated),
        }
    return sampling | {
        "end_id": _NO_TOKEN,
        "pad_id": _NO_TOKEN,
        "max_tokens": sequence.max_length - len(sequence.token_ids),
        "min_tokens": max(0, min(sequence.min_length, sequence.max_length) - len(sequence.token_ids)),
        "stop_token_ids": sorted(params.end_token_ids) or None,
        "include_stop_str_in_output": True,
        "repetition_penalty": params.repetition_penalty,
        "embedding_bias": _bias_tensor(params.logit_bias, vocab_size),
        # 0: report the log-prob of the sampled token only.
        "logprobs": 0,
        "detokenize": False,
    }


def _bias_tensor(biases: tuple[tuple[int, float], ...], vocab_size: int) -> torch.Tensor | None:
    if not biases:
        return None
    tensor = torch.zeros(vocab_size)
    for token, value in biases:
        tensor[token] = value
    return tensor


def _sampling_params(arguments: dict[str, Any]) -> Any:
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.sampling_params import LogprobMode

    # Processed: at the temperature, after top-k, top-p and min-p.
    return SamplingParams(logprobs_mode=LogprobMode.PROCESSED, **arguments)


# ---------------------------------------------------------------- weights and memory

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
        """Devices of TensorRT-LLM's workers, by the ids with which the workers look up handles."""

    def _begin_update(self) -> None:
        if not self._devices:
            self._devices = self._devices_of_workers()

    def _send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        # A worker opens the handles of its own device. The copies must live until all workers have replied.
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
