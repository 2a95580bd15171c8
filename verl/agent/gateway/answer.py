"""Answer: one answer under way, from the model's tokens to what the client is told of it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from verl.agent.gateway.tree import Message
from verl.inference.serving.openai_replies import Part, Token, sampled_tokens
from verl.inference.serving.openai_requests import ChatAsk
from verl.inference.serving.text_stream import TextStream
from verl.types.request import Output
from verl.utils.tool_calls import Parser

__all__ = ["Answer"]

# Whatever the format, a call begins with one of these; what comes before them is told as it comes.
_MAY_BEGIN_A_CALL = re.compile(r"[<{]")


class Answer:
    """Takes pieces of an output; says what is to be told after each. Calls are read when the last one is there.

    What is no well-formed call after all is told as text: the client sees what the model wrote.
    """

    def __init__(self, chat: ChatAsk, reads_calls: bool, parser: Parser, tokenizer: Any, ends: frozenset[int]) -> None:
        self.output = Output(finish_reason="")
        self.reply: Message = {"role": "assistant", "content": ""}
        """The message as it was told; whole when the last part is."""
        self._reads_calls = reads_calls
        self._text = TextStream(tokenizer, chat.ask.params.stop, special=reads_calls)
        self._written, self._told = chat.ask.begun, ""
        self._tools, self._parser, self._ends = chat.tools, parser, ends
        self._held: list[Token] = []
        self._held_end: list[int] = []
        # Where a call may begin, if `_searched` characters of `_written` hold such a place.
        self._may_begin_at: int | None = None
        self._searched = 0

    @property
    def stop_string(self) -> str | None:
        """The one that ended it."""
        return self._text.stopped

    def push(self, piece: Output) -> Part:
        """What is sure by now; the last part has a finish reason."""
        self._take(piece)
        self._held += sampled_tokens(piece)
        self._written += self._text.push(self._content(piece.token_ids))
        part = Part(0, finish_reason=piece.finish_reason or None)
        if part.finish_reason is None:
            content = self._sure()
        else:
            self._written += self._text.finish()
            content, part.calls = self._read()
            self.reply["content"] = content
            if part.calls:
                self.reply["tool_calls"] = part.calls
                part.finish_reason = "tool_calls" if part.finish_reason == "stop" else part.finish_reason
        part.text, self._told = content[len(self._told) :], content
        if part.text or part.calls or part.finish_reason:
            part.tokens, self._held = self._held, []
        return part

    def _content(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens to decode. A trailing end token is held back and only decoded if the answer continues after it."""
        tokens = [*self._held_end, *token_ids]
        self._held_end = tokens[-1:] if tokens and tokens[-1] in self._ends else []
        return tokens[: len(tokens) - len(self._held_end)]

    def _take(self, piece: Output) -> None:
        for name in ("token_ids", "log_probs", "versions", "raw_log_probs", "sampled_log_probs", "top_log_probs"):
            getattr(self.output, name).extend(getattr(piece, name))
        self.output.finish_reason = piece.finish_reason

    def _sure(self) -> str:
        """The beginning of what is written that no call can change."""
        if not self._reads_calls:
            return self._written
        if self._may_begin_at is None:
            mark = _MAY_BEGIN_A_CALL.search(self._written, self._searched)
            self._may_begin_at = None if mark is None else mark.start()
            self._searched = len(self._written)
        # White space before a call, or at the end of the answer, is dropped.
        return self._written[: self._may_begin_at].rstrip()

    def _read(self) -> tuple[str, list[dict[str, Any]]]:
        if not self._reads_calls:
            return self._written, []
        content, calls = self._parser.parse(self._written, self._tools)
        if any(call.error for call in calls):
            return self._written, []
        # Ids of nine letters and digits: some templates take no others.
        told = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return content, [
            {"index": index, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}
            for index, function in enumerate(told)
        ]
