"""Tools: responses that are forced to begin with a call, and parsing calls from the text of a response.

Calls have the format that most open models are trained on: <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from verl.inference.constraints import text_grammar
from verl.inference.serving.api_errors import ApiError
from verl.inference.serving.request_models import ChatRequest, FunctionChoice
from verl.utils.tool_calls import HERMES_CLOSE, HERMES_OPEN, parse_json_call

__all__ = ["ToolText", "forced_call", "strict_grammar"]

_ARGUMENTS = ', "arguments": '


def forced_call(request: ChatRequest) -> str:
    """The beginning of a response that calls a tool, for a `tool_choice` that requires one; otherwise ""."""
    choice = request.tool_choice
    if choice in ("none", "auto"):
        return ""
    if not request.tools:
        raise ApiError("tool_choice: needs tools to choose from.", "tool_choice")
    if not isinstance(choice, FunctionChoice):
        return f'{HERMES_OPEN}\n{{"name": "'
    names = [tool.function.name for tool in request.tools]
    if choice.function.name not in names:
        raise ApiError(f"tool_choice: should be one of the tools ({', '.join(names)[:200]}).", "tool_choice")
    return f'{HERMES_OPEN}\n{{"name": {json.dumps(choice.function.name)}{_ARGUMENTS}'


def strict_grammar(request: ChatRequest) -> str | None:
    """The grammar of a forced call after its beginning, if all functions that it may call are `strict`."""
    choice, called = request.tool_choice, [tool.function for tool in request.tools]
    named = isinstance(choice, FunctionChoice)
    if isinstance(choice, FunctionChoice):
        called = [function for function in called if function.name == choice.function.name]
    if not all(function.strict for function in called):
        return None
    rows: list[list[Any]] = []
    for function in called:
        name = [] if named else [json.dumps(function.name)[1:] + _ARGUMENTS]
        rows.append([*name, function.parameters or {"type": "object"}, "}"])  # the end of the response closes it
    try:
        return text_grammar(rows)
    except ValueError as error:
        raise ApiError(f"tools: the grammar of their parameters cannot be built: {error}.", "tools") from error


class ToolText:
    """Splits the text of a response into content and tool calls. Invalid calls stay in the content."""

    def __init__(self, forced_prefix: str) -> None:
        """`forced_prefix`: beginning of the response that was part of the prompt."""
        self._pending = forced_prefix
        self.calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return the content and the calls that are final now. White space around calls is removed."""
        self._pending += text
        content, calls = "", []
        while (start := self._pending.find(HERMES_OPEN)) >= 0:
            end = self._pending.find(HERMES_CLOSE, start)
            if end < 0 and not last:
                break
            stop = len(self._pending) if end < 0 else end + len(HERMES_CLOSE)
            call = _call(self._pending[start + len(HERMES_OPEN) : stop if end < 0 else end])
            content += self._pending[:stop] if call is None else self._pending[:start].rstrip()
            if call is not None:
                calls.append({"index": self.calls, **call})
                self.calls += 1
            self._pending = self._pending[stop:]
        if last:
            remaining, self._pending = self._pending, ""
            return content + (remaining.rstrip() if self.calls else remaining), calls
        end = start if start >= 0 else len(self._pending) - _partial_open_length(self._pending)
        final = self._pending[:end].rstrip()
        self._pending = self._pending[len(final) :]
        return content + final, calls


def _partial_open_length(text: str) -> int:
    """Number of characters at the end that may begin a call."""
    return next((count for count in range(len(HERMES_OPEN) - 1, 0, -1) if text.endswith(HERMES_OPEN[:count])), 0)


def _call(text: str) -> dict[str, Any] | None:
    call = parse_json_call(text)
    if call.error is not None:
        return None
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
