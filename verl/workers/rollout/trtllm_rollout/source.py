"""TRTLLMSource: TensorRT-LLM's `AsyncLLM` as a `TokenSource`; its coroutines run in the event loop of the streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import torch

from verl.inference.sequence import Sequence
from verl.utils.counter_noise import engine_seed
from verl.workers.rollout.streaming_server import StreamEvent, params_after
from verl.workers.rollout.third_party_tokens import PROBE_PROMPT, PROBE_TOP_TOKENS

__all__ = ["TRTLLMSource", "sampling_arguments"]

_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
# Id of no token. The end tokens of a request are passed as stop tokens, which are reported.
_NO_TOKEN = -1


class TRTLLMSource:
    """A pause aborts running requests, which are sent again after it."""

    def __init__(self, llm: Any, max_sequences: int, vocab_size: int) -> None:
        """`llm`: an `AsyncLLM`."""
        self.max_streams = 2 * max_sequences
        self._llm, self._vocab_size = llm, vocab_size
        self._running: set[Any] = set()
        self._cache_salt = 0
        """Namespace of the prefix cache."""

    def build_request(self, sequence: Sequence) -> tuple[list[int], dict[str, Any]]:
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
                # It has all tokens so far.
                tokens, entries = completion.token_ids[received:], (completion.logprobs or [])[received:]
                received = len(completion.token_ids)
                log_probs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
                reason = completion.finish_reason
                yield list(tokens), log_probs, None if reason is None else _FINISH_REASONS.get(reason, "error")
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
        params = _sampling_params({"temperature": temperature, "top_k": max(0, top_k), "max_tokens": 1, "end_id": -1})
        params.logprobs = PROBE_TOP_TOKENS
        output = await self._llm.generate_async({"prompt_token_ids": list(PROBE_PROMPT)}, params)
        (log_probs,) = output.outputs[0].logprobs
        return {token: entry.logprob for token, entry in log_probs.items()}

    async def close(self) -> None:
        self._llm.shutdown()


def sampling_arguments(sequence: Sequence, vocab_size: int) -> dict[str, Any]:
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
        "stop_token_ids": sorted(params.ends) or None,
        "include_stop_str_in_output": True,
        "repetition_penalty": params.repetition_penalty,
        "embedding_bias": _bias_tensor(params.logit_bias, vocab_size),
        # 0: of the sampled token only.
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
