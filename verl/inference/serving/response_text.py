"""The text of a response: its grammar, a forced tool call at its beginning, detokenisation, and parsing of tool calls.

Calls have the format that most open models are trained on: <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from verl.inference.constraints import json_grammar, text_grammar
from verl.inference.serving.api import ApiError
from verl.inference.serving.request_models import ChatRequest, FunctionChoice, GenerationRequest
from verl.utils.tool_calls import HERMES_CLOSE, HERMES_OPEN, parse_json_call

__all__ = ["TextStream", "ToolCallSplitter", "forced_call", "response_grammar", "strict_grammar"]

_ARGUMENTS = ', "arguments": '
_FORMAT = "response_format"
# Decoders output this character for an incomplete one.
_REPLACEMENT = "\ufffd"


def forced_call(request: ChatRequest) -> str:
    """Return the text that the response must begin with if `tool_choice` requires a call; otherwise "".

    It ends before the tool's name, or before the arguments if `tool_choice` names the tool.
    """
    choice = request.tool_choice
    if choice in ("none", "auto"):
        return ""
    if not request.tools:
        raise ApiError("tool_choice requires a non-empty list of tools.", "tool_choice")
    if not isinstance(choice, FunctionChoice):
        return f'{HERMES_OPEN}\n{{"name": "'
    names = [tool.function.name for tool in request.tools]
    if choice.function.name not in names:
        raise ApiError(
            f"tool_choice: {choice.function.name[:200]!r} is not one of the tools: {', '.join(names)[:200]}.",
            "tool_choice",
        )
    return f'{HERMES_OPEN}\n{{"name": {json.dumps(choice.function.name)}{_ARGUMENTS}'


def strict_grammar(request: ChatRequest) -> str | None:
    """Return the grammar of the text that completes the call begun by `forced_call`, or None.

    None if one of the functions that may be called is not `strict`: its arguments need not match its schema.
    """
    choice, candidates = request.tool_choice, [tool.function for tool in request.tools]
    named = choice.function.name if isinstance(choice, FunctionChoice) else None
    if named is not None:
        candidates = [function for function in candidates if function.name == named]
    if not all(function.strict for function in candidates):
        return None
    alternatives: list[list[Any]] = []
    for function in candidates:
        # [1:]: the opening quote of the name is part of `forced_call`.
        name = [] if named is not None else [json.dumps(function.name)[1:] + _ARGUMENTS]
        # Without the closing tag: the response ends after the call.
        alternatives.append([*name, function.parameters or {"type": "object"}, "}"])
    try:
        return text_grammar(alternatives)
    except ValueError as error:
        raise ApiError(f"tools: the grammar of their parameters cannot be built: {error}.", "tools") from error


def response_grammar(request: GenerationRequest) -> str | None:
    """The grammar of the response. None: any text."""
    requested = request.response_format
    if requested.type == "text":
        return None
    if request.min_tokens or request.ignore_eos:
        raise ApiError(
            f"{_FORMAT}: cannot be combined with min_tokens or ignore_eos: the grammar ends the response.", _FORMAT
        )
    schema: dict[str, Any] = {"type": "object"}
    if requested.type == "json_schema":
        if requested.json_schema is None:
            raise ApiError(
                f'{_FORMAT}: should be {{"type": "json_schema", "json_schema": {{"schema": {{…}}}}}}.', _FORMAT
            )
        schema = requested.json_schema.json_schema
    try:
        return json_grammar(schema)
    except ValueError as error:
        raise ApiError(f"{_FORMAT}: the grammar of this schema cannot be built: {error}.", _FORMAT) from error


class ToolCallSplitter:
    """Splits the text of a response, which arrives in pieces, into content and tool calls.

    Invalid calls stay in the content.
    """

    def __init__(self, forced_prefix: str) -> None:
        """`forced_prefix`: text of `forced_call`, which was appended to the prompt and belongs to the first call."""
        self._pending = forced_prefix
        """Text that may still become part of a call, and was not returned yet."""
        self.num_calls = 0
        """Number of calls returned so far."""

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return the new content and the new calls. `last`: the response ends with this text.

        White space before calls is removed, and after the last one at the end of the response.
        """
        self._pending += text
        content, calls = "", []
        while (block := self._next_block(last)) is not None:
            block_content, call = block
            content += block_content
            if call is not None:
                calls.append({"index": self.num_calls, **call})
                self.num_calls += 1
        if last:
            remaining, self._pending = self._pending, ""
            return content + (remaining.rstrip() if self.num_calls else remaining), calls
        # White space and text that may begin a call stay pending.
        open_tag = self._pending.find(HERMES_OPEN)
        content_end = open_tag if open_tag >= 0 else len(self._pending) - _partial_open_length(self._pending)
        new_content = self._pending[:content_end].rstrip()
        self._pending = self._pending[len(new_content) :]
        return content + new_content, calls

    def _next_block(self, last: bool) -> tuple[str, dict[str, Any] | None] | None:
        """Remove the text up to the end of the next complete call from the pending text.

        Return the content before the call, and the call. If the call is invalid, it is part of the content, and the
        second value is None. Return None if no call is complete; the end of the response completes a call.
        """
        start = self._pending.find(HERMES_OPEN)
        close_tag = self._pending.find(HERMES_CLOSE, start)
        if start < 0 or (close_tag < 0 and not last):
            return None
        call_end, block_end = close_tag, close_tag + len(HERMES_CLOSE)
        if close_tag < 0:
            call_end = block_end = len(self._pending)
        call = _parse_call(self._pending[start + len(HERMES_OPEN) : call_end])
        content = self._pending[:block_end] if call is None else self._pending[:start].rstrip()
        self._pending = self._pending[block_end:]
        return content, call


def _partial_open_length(text: str) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of an opening tag."""
    return next((count for count in range(len(HERMES_OPEN) - 1, 0, -1) if text.endswith(HERMES_OPEN[:count])), 0)


def _parse_call(text: str) -> dict[str, Any] | None:
    """Parse the JSON between the tags to a call in the format of the API; None if it is invalid."""
    call = parse_json_call(text)
    if call.error is not None:
        return None
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class TextStream:
    """Detokenises one response. `push` returns text that is final; the concatenated pieces are the whole text.

    `context`: the last tokens before the response; decoders drop the space in front of the first word of a text.
    `special`: include special tokens.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = (), special: bool = False
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stop = tuple(stop)
        self.stopped: str | None = None
        """The stop string that occurred: the text ends before it."""
        # Recent tokens. The text of the first `_num_emitted` of them is already emitted: they only give the decoder
        # context.
        self._tokens = list(context)
        if self._decode(self._tokens).endswith(_REPLACEMENT):
            self._tokens = []
        self._num_emitted = len(self._tokens)
        self._pending = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is final now."""
        if not token_ids:
            return ""
        self._tokens.extend(token_ids)
        text = self._decode(self._tokens)
        return "" if text.endswith(_REPLACEMENT) else self._emit(self._new_text(text), last=False)

    def finish(self) -> str:
        """Return the text that was held back. Call it once, after the last token."""
        return self._emit(self._new_text(self._decode(self._tokens)), last=True)

    def _new_text(self, text: str) -> str:
        """The part of `text` (of all recent tokens) that is not emitted yet; marks all of it as emitted."""
        emitted = len(self._decode(self._tokens[: self._num_emitted]))
        del self._tokens[: self._num_emitted]
        self._num_emitted = len(self._tokens)
        return text[emitted:]

    def _emit(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._pending += text
        matches = [(index, stop) for stop in self._stop if (index := self._pending.find(stop)) >= 0]
        if matches:
            index, self.stopped = min(matches)
            return self._pending[:index]
        ready = len(self._pending) - (0 if last else self._partial_stop_length())
        text, self._pending = self._pending[:ready], self._pending[ready:]
        return text

    def _partial_stop_length(self) -> int:
        """Number of characters at the end that may begin a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-count:]) for stop in self._stop):
                return count
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
