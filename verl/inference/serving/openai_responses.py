"""JSON responses of the OpenAI API: choices, stream chunks, log-probs, tool calls, usage."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from verl.inference.serving.openai_requests import ParsedRequest
from verl.types.request import Output, TopLogProbs

__all__ = ["ResponseChunk", "ResponseEncoder", "Token", "prompt_tokens", "sampled_tokens"]

Token = tuple[int, "float | None", "TopLogProbs | None"]
"""A token, its log-prob and the most likely tokens at its position; None for the first token of a prompt."""


@dataclass
class ResponseChunk:
    """A piece of a choice: text and its tokens; `offset` is the number of characters sent before."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0
    finish_reason: str | None = None
    prompt: list[Token] = field(default_factory=list)
    """Tokens of the prompt, if `prompt_logprobs` was requested."""


def sampled_tokens(output: Output) -> list[Token]:
    tops: Sequence[TopLogProbs | None] = output.top_log_probs or [None] * len(output.token_ids)
    return list(zip(output.token_ids, output.raw_log_probs, tops, strict=True))


def prompt_tokens(prompt: Sequence[int], output: Output) -> list[Token]:
    """The tokens of a prompt with the log-probs in its output."""
    scored = zip(prompt[1:], output.prompt_log_probs, output.prompt_top_log_probs, strict=True)
    return [(prompt[0], None, None), *scored]


class ResponseEncoder:
    """Encodes the response to one request as JSON; all its chunks have the same id.

    Log-probs are those of the model (temperature 1, no top-p or top-k), for all sampled tokens including the end token.
    """

    def __init__(self, parsed: ParsedRequest, chat: bool, tokenizer: Any) -> None:
        self._chat, self._parsed = chat, parsed
        self._text_of = lru_cache(2**16)(lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False))
        self._kind = "chat.completion" if chat else "text_completion"
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": parsed.model,
        }

    def frame(self, completion_tokens: int) -> tuple[str, str]:
        """The JSON before and after the choices of a complete response."""
        content = {**self._base, "object": self._kind, "usage": self._usage(completion_tokens), "choices": []}
        return json.dumps(content, ensure_ascii=False)[: -len("]}")], "]}"

    def choice(self, chunk: ResponseChunk) -> str:
        """The JSON of a complete choice."""
        message: dict[str, Any] = {"role": "assistant", "content": chunk.text}
        if chunk.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in chunk.calls]
            message = {**message, "content": chunk.text or None, "tool_calls": calls}
        return json.dumps(
            self._choice(chunk, {"message": message} if self._chat else {"text": chunk.text}), ensure_ascii=False
        )

    def first_chunk(self, index: int) -> str | None:
        """The first chunk of a chat choice, with its role; None for completions."""
        chunk = ResponseChunk(index)
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk_json([{**self._choice(chunk, delta), "logprobs": None}]) if self._chat else None

    def chunk(self, chunk: ResponseChunk) -> str:
        """The JSON of a stream chunk."""
        delta: dict[str, Any] = (
            {"content": chunk.text} if chunk.text or not (chunk.calls or chunk.finish_reason) else {}
        )
        if chunk.calls:
            delta["tool_calls"] = chunk.calls
        return self._chunk_json([self._choice(chunk, {"delta": delta} if self._chat else {"text": chunk.text})])

    def usage_chunk(self, completion_tokens: int) -> str:
        """The last stream chunk, with `usage` and without choices."""
        return self._chunk_json([], usage=self._usage(completion_tokens))

    def _choice(self, chunk: ResponseChunk, content: dict[str, Any]) -> dict[str, Any]:
        log_probs = self._log_probs(chunk) if self._parsed.log_probs else None
        if chunk.prompt:
            content = {**content, "prompt_logprobs": [self._by_id(*token) for token in chunk.prompt]}
        return {"index": chunk.index, **content, "logprobs": log_probs, "finish_reason": chunk.finish_reason}

    def _chunk_json(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else self._kind
        return json.dumps({**self._base, "object": kind, "choices": choices, **more}, ensure_ascii=False)

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self._parsed.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    # ---------------------------------------------------------------- log-probs

    def _log_probs(self, chunk: ResponseChunk) -> dict[str, Any]:
        if self._chat:
            content = [
                {**self._entry(token, log_prob), "top_logprobs": [self._entry(*other) for other in top or ()]}
                for token, log_prob, top in chunk.tokens
            ]
            return {"content": content, "refusal": None}
        texts = [self._text_of(token) for token, _, _ in chunk.tokens]
        tops = [self._top_by_text(*token) for token in chunk.tokens] if self._parsed.params.top_log_probs else None
        return {
            "tokens": texts,
            "token_logprobs": [log_prob for _, log_prob, _ in chunk.tokens],
            "top_logprobs": tops,
            "text_offset": _offsets(texts, chunk.offset),
        }

    def _by_id(self, token: int, log_prob: float | None, top: TopLogProbs | None) -> dict[str, Any] | None:
        """The most likely tokens and the token itself, by id; None for the first token of the prompt."""
        if log_prob is None:
            return None
        ranked: list[tuple[int, float, int | None]]
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(top or (), start=1)]
        ranked += [] if any(other == token for other, _, _ in ranked) else [(token, log_prob, None)]
        return {
            str(other): {"logprob": value, "rank": rank, "decoded_token": self._text_of(other)}
            for other, value, rank in ranked
        }

    def _entry(self, token: int, log_prob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        is_complete = "\ufffd" not in text  # the bytes of an incomplete character are not known from its text
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode()) if is_complete else None}

    def _top_by_text(self, token: int, log_prob: float | None, top: TopLogProbs | None) -> dict[str, Any] | None:
        """Log-probs of the most likely tokens and the token itself, by text; the most likely of equal texts."""
        if top is None:
            return None
        log_probs: dict[str, Any] = {}
        for other, value in [*top, (token, log_prob)]:
            log_probs.setdefault(self._text_of(other), value)
        return log_probs


def _offsets(texts: Sequence[str], start: int) -> list[int]:
    """Offset of each token's text."""
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return offsets
