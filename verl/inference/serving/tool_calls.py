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

__all__ = ["ToolText", "forced_call", "strict_grammar"]

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
    """Return the grammar of a forced call, after the text of `forced_call`; None unless all functions that may be
    called are `strict`."""
    choice, candidates = request.tool_choice, [tool.function for tool in request.tools]
    is_named = isinstance(choice, FunctionChoice)
    if isinstance(choice, FunctionChoice):
        candidates = [function for function in candidates if function.name == choice.function.name]
    if not all(function.strict for function in candidates):
        return None
    alternatives: list[list[Any]] = []
    for function in candidates:
        # The opening quote of the name is part of `forced_call`.
        name = [] if is_named else [json.dumps(function.name)[1:] + _ARGUMENTS]
        # Without the closing tag: the response ends after the call.
        alternatives.append([*name, function.parameters or {"type": "object"}, "}"])
    try:
        return text_grammar(alternatives)
    except ValueError as error:
        raise ApiError(f"tools: the grammar of their parameters cannot be built: {error}.", "tools") from error


class ToolText:
    """Splits the text of a response, which arrives in pieces, into content and tool calls.

    Invalid calls stay in the content.
    """

    def __init__(self, forced_prefix: str) -> None:
        """`forced_prefix`: beginning of the response that was part of the prompt."""
        self._pending = forced_prefix
        """Text that is neither content nor a call yet."""
        self.calls = 0
        """Number of calls so far."""

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text (`last`: the end of the response); return the new content and the new calls.

        White space around calls is removed.
        """
        self._pending += text
        content, calls = "", []
        while (block := self._next_block(last)) is not None:
            block_content, call = block
            content += block_content
            if call is not None:
                calls.append({"index": self.calls, **call})
                self.calls += 1
        if last:
            remaining, self._pending = self._pending, ""
            return content + (remaining.rstrip() if self.calls else remaining), calls
        # White space and text that may begin a call stay pending.
        open_tag = self._pending.find(HERMES_OPEN)
        end = open_tag if open_tag >= 0 else len(self._pending) - _partial_open_length(self._pending)
        final = self._pending[:end].rstrip()
        self._pending = self._pending[len(final) :]
        return content + final, calls

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
