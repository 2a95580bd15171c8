"""StreamedResponse: converts the streamed tokens of a response to text and tool calls for the client."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from verl.agent.gateway.tree import Message
from verl.inference.serving.openai_requests import ParsedChatRequest
from verl.inference.serving.openai_responses import ResponseChunk, Token, sampled_tokens
from verl.inference.serving.response_text import TextStream
from verl.types.request import Output
from verl.utils.tool_calls import Parser

__all__ = ["StreamedResponse"]

# Tool calls of every format begin with one of these characters. Text before them can be sent immediately.
_CALL_START = re.compile(r"[<{]")


class StreamedResponse:
    """Collects the pieces of an output and returns the new parts for the client. Tool calls are parsed after the last
    piece. If one is malformed, the whole response is sent as text.
    """

    def __init__(
        self, chat: ParsedChatRequest, parse_calls: bool, parser: Parser, tokenizer: Any, end_token_ids: frozenset[int]
    ) -> None:
        """`parse_calls`: whether tool calls are parsed; otherwise they stay text. `end_token_ids`: tokens that end a
        turn and are not part of its text."""
        self.output = Output(finish_reason="")
        """All pieces so far."""
        self.reply: Message = {"role": "assistant", "content": ""}
        """The message that the client received; complete after the last chunk."""
        self._should_parse_calls = parse_calls
        self._text = TextStream(tokenizer, chat.generation.params.stop, special=parse_calls)
        self._text_so_far, self._sent = chat.generation.forced_prefix, ""
        self._tools, self._parser, self._end_token_ids = chat.tools, parser, end_token_ids
        self._unsent: list[Token] = []
        self._unsent_end: list[int] = []
        # Position at which a call may begin; None if the first `_searched` characters have none.
        self._call_start: int | None = None
        self._searched = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the response."""
        return self._text.stopped

    def push(self, piece: Output) -> ResponseChunk:
        """Add a piece; return the new text that later pieces cannot change. The last chunk has a finish reason."""
        self._append(piece)
        self._unsent += sampled_tokens(piece)
        self._text_so_far += self._text.push(self._content(piece.token_ids))
        chunk = ResponseChunk(0, finish_reason=piece.finish_reason or None)
        if chunk.finish_reason is None:
            content = self._final_text()
        else:
            self._text_so_far += self._text.finish()
            content, chunk.calls = self._parse_calls()
            self.reply["content"] = content
            if chunk.calls:
                self.reply["tool_calls"] = chunk.calls
                chunk.finish_reason = "tool_calls" if chunk.finish_reason == "stop" else chunk.finish_reason
        chunk.text, self._sent = content[len(self._sent) :], content
        if chunk.text or chunk.calls or chunk.finish_reason:
            chunk.tokens, self._unsent = self._unsent, []
        return chunk

    def _content(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens to decode. An end token in last position is decoded only if the response continues."""
        tokens = [*self._unsent_end, *token_ids]
        self._unsent_end = tokens[-1:] if tokens and tokens[-1] in self._end_token_ids else []
        return tokens[: len(tokens) - len(self._unsent_end)]

    def _append(self, piece: Output) -> None:
        for name in ("token_ids", "log_probs", "versions", "raw_log_probs", "sampled_log_probs", "top_log_probs"):
            getattr(self.output, name).extend(getattr(piece, name))
        self.output.finish_reason = piece.finish_reason

    def _final_text(self) -> str:
        """Return the text that cannot be part of a tool call."""
        if not self._should_parse_calls:
            return self._text_so_far
        if self._call_start is None:
            match = _CALL_START.search(self._text_so_far, self._searched)
            self._call_start = None if match is None else match.start()
            self._searched = len(self._text_so_far)
        # White space before a call, or at the end of the response, is removed.
        return self._text_so_far[: self._call_start].rstrip()

    def _parse_calls(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the text without tool calls, and the calls in the format of the OpenAI API."""
        if not self._should_parse_calls:
            return self._text_so_far, []
        content, calls = self._parser.parse(self._text_so_far, self._tools)
        if any(call.error for call in calls):
            return self._text_so_far, []
        # Ids of nine letters and digits: some templates accept no others.
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return content, [
            {"index": index, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
