"""A fake of tensorrt_llm, which has no wheel for the test machines: the documented signatures and a log of calls.

It samples by `next_token`, so lost or duplicated tokens show in the output. A call that deviates from the
documentation (1.3, `llm-api/reference`) raises a TypeError.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.url_server import next_token

__version__ = "0.0.0"


class LogprobMode(enum.Enum):
    RAW = "raw"
    PROCESSED = "processed"


class ExecutorMemoryType(enum.Enum):
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model_engine_main"


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: torch.Tensor | None = None
    n: int = 1
    logprobs_mode: LogprobMode = LogprobMode.RAW
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float | None = None
    max_tokens: int | None = None


@dataclass
class CudaGraphConfig:
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


@dataclass
class SleepConfig:
    restore_modes: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


class RequestOutput:
    """The output so far; an asynchronous iterator that yields itself after every token."""

    times_out_at: int | None = None
    """Number of tokens after which requests end with the finish reason `timeout`."""

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt_token_ids, self.params = prompt, params
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0.003)
        completion = self.outputs[0]
        if self.aborted:
            completion.finish_reason = "cancelled"
        else:
            token = next_token(self.prompt_token_ids + completion.token_ids)
            completion.token_ids.append(token)
            completion.logprobs.append({token: Logprob(-token / 100)})
            if len(completion.token_ids) == self.params.max_tokens:
                completion.finish_reason = "length"
            elif len(completion.token_ids) == self.times_out_at:
                completion.finish_reason = "timeout"
        self.finished = completion.finish_reason is not None
        return self

    def __await__(self) -> Any:
        """Return the top log-probs of the first token at once, for the log-prob probe: 264 tokens, descending."""
        processed = self.params.logprobs_mode.value == "processed"
        temperature = self.params.temperature if processed else 1.0
        logits = -0.1 * torch.arange(self.params.top_k or 264, dtype=torch.float64) / temperature
        log_probs = logits.log_softmax(0)[: self.params.logprobs].tolist()
        self.outputs[0].logprobs = [{token: Logprob(value) for token, value in enumerate(log_probs)}]
        return asyncio.sleep(0, self).__await__()


class LLM:
    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        *,
        model_kwargs: dict[str, Any] | None = None,
        load_format: str = "auto",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_num_tokens: int | None = None,
        enable_chunked_prefill: bool = False,
        stream_interval: int = 1,
        kv_cache_config: KvCacheConfig | None = None,
        cuda_graph_config: CudaGraphConfig | None = None,
        sleep_config: SleepConfig | None = None,
        allreduce_strategy: str = "AUTO",
        disable_overlap_scheduler: bool = False,
    ) -> None:
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.log: list[tuple[Any, ...]] = []
        self.requests: list[RequestOutput] = []
        self.salts: list[str | None] = []

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        assert sampling_params is not None
        assert asyncio.get_running_loop()
        result = RequestOutput(inputs["prompt_token_ids"], sampling_params)
        if streaming:
            self.requests.append(result)
            self.salts.append(cache_salt)
        return result

    def shutdown(self) -> None:
        self.log.append(("shutdown",))


class AsyncLLM(LLM):
    """`last`: the most recently created instance."""

    last: AsyncLLM

    def __init__(
        self,
        placement_groups: list[Any] | None = None,
        placement_bundle_indices: list[list[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.weights: dict[str, torch.Tensor] = {}
        AsyncLLM.last = self

    async def setup_async(self) -> AsyncLLM:
        self.log.append(("setup_async",))
        return self

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        target_ranks: Any = None,
    ) -> list[Any]:
        self.log.append(("collective_rpc", method))
        return ["GPU-here"]

    async def update_weights(self, weights: dict[str, Any] | None) -> None:
        self.log.append(("update_weights", weights is None))
        for name, (rebuild, args) in (weights or {}).get("GPU-here", ()):
            self.weights[name] = rebuild(*args).clone()

    async def release(self, tags: list[Any]) -> None:
        self.log.append(("release", *tags))

    async def resume(self, tags: list[Any]) -> None:
        self.log.append(("resume", *tags))


def modules() -> dict[str, types.ModuleType]:
    """The entries of `sys.modules` that replace tensorrt_llm by this module."""
    module = sys.modules[__name__]
    return {name: module for name in ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.sampling_params")}
