"""What an OpenAI client is told: choices, pieces of them, log-probs, usage."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from verl.types.request import Output

__all__ = ["Replies", "usage"]


class Replies:
    """The replies to one request, all under one id. Log-probs are those of the model itself: temperature 1, no cut.

    There is one for every sampled token, the one that ended the answer included.
    """

    def __init__(self, chat: bool, model: str, tokenizer: Any, log_probs: bool) -> None:
        self._chat, self._tokenizer, self._log_probs = chat, tokenizer, log_probs
        self._kind = "chat.completion" if chat else "text_completion"
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {**self._base, "object": self._kind, "choices": choices, "usage": usage}

    def choice(self, index: int, text: str, output: Output) -> dict[str, Any]:
        """An answer from its beginning to its end."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {
            "index": index,
            **said,
            "logprobs": self._log_probs_of(output, 0),
            "finish_reason": output.finish_reason,
        }

    def first_piece(self, index: int) -> str | None:
        """Said before an answer begins: who speaks."""
        return self._piece(index, {"role": "assistant", "content": ""}, None, None) if self._chat else None

    def piece(self, index: int, text: str, output: Output, offset: int, finish_reason: str | None) -> str:
        """Text and the tokens that came with it; `offset` counts the characters sent before."""
        said: Any = text
        if self._chat:
            said = {"content": text} if text or finish_reason is None else {}
        return self._piece(index, said, self._log_probs_of(output, offset), finish_reason)

    def usage_piece(self, usage: dict[str, int]) -> str:
        return self._event([], usage)

    def _piece(self, index: int, said: Any, log_probs: Any, finish_reason: str | None) -> str:
        name = "delta" if self._chat else "text"
        return self._event([{"index": index, name: said, "logprobs": log_probs, "finish_reason": finish_reason}], None)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> str:
        kind = "chat.completion.chunk" if self._chat else self._kind
        told = {**self._base, "object": kind, "choices": choices}
        return json.dumps(told if usage is None else {**told, "usage": usage}, ensure_ascii=False)

    def _log_probs_of(self, output: Output, offset: int) -> dict[str, Any] | None:
        if not self._log_probs:
            return None
        texts = [self._tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in output.token_ids]
        if not self._chat:
            return {
                "tokens": texts,
                "token_logprobs": output.raw_log_probs,
                "top_logprobs": None,
                "text_offset": _offsets(texts, offset),
            }
        pairs = zip(texts, output.raw_log_probs, strict=True)
        return {"content": [_token_entry(text, log_prob) for text, log_prob in pairs], "refusal": None}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The count of tokens, as the API words it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _token_entry(text: str, log_prob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text  # half a character: which bytes it has is not told by its text
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode()) if whole else None, "top_logprobs": []}


def _offsets(texts: Sequence[str], start: int) -> list[int]:
    """Where each token's text begins."""
    places = []
    for text in texts:
        places.append(start)
        start += len(text)
    return places
