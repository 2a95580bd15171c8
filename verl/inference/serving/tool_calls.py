"""Tools: responses that are forced to begin with a call, and parsing calls from the text of a response.

Calls have the format that most open models are trained on: <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from verl.inference.constraints import text_grammar
from verl.inference.serving.api import ApiError
from verl.inference.serving.request_models import ChatRequest, FunctionChoice
from verl.utils.tool_calls import HERMES_CLOSE, HERMES_OPEN, parse_json_call

__all__ = ["ToolCallSplitter", "forced_call", "strict_grammar"]

_ARGUMENTS = ', "arguments": '


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
