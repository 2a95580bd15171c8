"""TRTLLMSource: answers of TensorRT-LLM's engine, whose coroutines run in the event loop of the streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from verl.inference.sequence import Sequence
from verl.workers.rollout.log_prob_probe import PROBE_PROMPT, PROBED_TOKENS
from verl.workers.rollout.streamed_server import Event, after_tokens
from verl.workers.rollout.trtllm_rollout.sampling import sampling_arguments

__all__ = ["TRTLLMSource"]

_ENDS = {"stop": "stop", "length": "length", "cancelled": "abort"}


class TRTLLMSource:
    """A `TokenSource`. What runs is aborted by a pause, and asked for again after it."""

    def __init__(self, llm: Any, max_sequences: int, vocab: int) -> None:
        """`llm` is an `AsyncLLM`."""
        self.open_at_once = 2 * max_sequences
        self._llm, self._vocab = llm, vocab
        self._running: set[Any] = set()
        self._epoch = 0

    def question(self, sequence: Sequence) -> tuple[list[int], dict[str, Any]]:
        return list(sequence.token_ids), sampling_arguments(sequence, self._vocab)

    async def answer(
        self, question: tuple[list[int], dict[str, Any]], told: list[int]
    ) -> AsyncGenerator[Event | None, None]:
        prompt, asked = question
        yield None
        result = self._llm.generate_async(
            {"prompt_token_ids": prompt + told},
            _params(after_tokens(asked, len(told))),
            streaming=True,
            cache_salt=str(self._epoch),
        )
        self._running.add(result)
        seen = 0
        try:
            async for output in result:
                answer = output.outputs[0]
                # It tells all so far.
                tokens, entries = answer.token_ids[seen:], (answer.logprobs or [])[seen:]
                seen = len(answer.token_ids)
                log_probs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
                ended = answer.finish_reason
                yield list(tokens), log_probs, None if ended is None else _ENDS.get(ended, "error")
        finally:
            self._running.discard(result)
            if not result.finished:
                result.abort()

    def pause(self) -> None:
        for result in list(self._running):
            result.abort()

    def resume(self) -> None: ...

    def forget_prefixes(self) -> None:
        """Newcomers look for KV under another name."""
        self._epoch += 1

    async def top(self, temperature: float, top_k: int) -> Mapping[int, float]:
        """Log-probs of the likeliest tokens after `PROBE_PROMPT`."""
        params = _params({"temperature": temperature, "top_k": max(0, top_k), "max_tokens": 1, "end_id": -1})
        params.logprobs = PROBED_TOKENS
        output = await self._llm.generate_async({"prompt_token_ids": list(PROBE_PROMPT)}, params)
        (found,) = output.outputs[0].logprobs
        return {token: entry.logprob for token, entry in found.items()}

    async def close(self) -> None:
        self._llm.shutdown()


def _params(asked: dict[str, Any]) -> Any:
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.sampling_params import LogprobMode

    # Processed: at the temperature, after top-k, top-p and min-p.
    return SamplingParams(logprobs_mode=LogprobMode.PROCESSED, **asked)
