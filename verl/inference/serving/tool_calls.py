"""Tools: what a chat says about them, checked for its template; and the calls in an answer, found as its text comes.

Calls are read in the form most open models are trained on: <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from verl.inference.grammar import text_grammar
from verl.inference.serving.fields import ApiError, Fields
from verl.utils.tool_calls.call import json_call
from verl.utils.tool_calls.hermes import CLOSE, OPEN

__all__ = ["ToolText", "asked_tools", "strict_grammar", "with_read_arguments"]

Tools = list[dict[str, Any]]

_ARGUMENTS = ', "arguments": '


def asked_tools(fields: Fields) -> tuple[Tools, str]:
    """The tools that the model may call, and what its answer must begin with so that it calls one ("": as it likes)."""
    tools, choice = fields.given.get("tools", []), fields.given.get("tool_choice", "auto")
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else [None]
    if None in names:
        fields.refuse("tools", 'must be a list of {type: "function", function: {name: …}}')
    if choice in ("none", "auto"):
        return ([] if choice == "none" else tools), ""
    if not tools:
        fields.refuse("tool_choice", "needs tools to choose from")
    if choice == "required":
        return tools, f'{OPEN}\n{{"name": "'
    if _name_of(choice) not in names:
        fields.refuse(
            "tool_choice", f"must be none, auto, required, or one of the tools ({', '.join(map(str, names))})"
        )
    return tools, f'{OPEN}\n{{"name": {json.dumps(_name_of(choice))}{_ARGUMENTS}'


def strict_grammar(fields: Fields, tools: Tools, begun: str) -> str | None:
    """What an answer that begins a call must go on with, where all that it may call are `strict`; None: anything."""
    called = [tool["function"] for tool in tools]
    if not begun or not called:
        return None
    named = begun.endswith(_ARGUMENTS)
    if named:
        name = _name_of(fields.given["tool_choice"])
        called = [function for function in called if function["name"] == name]
    if not all(function.get("strict") is True for function in called):
        return None
    rows: list[list[Any]] = []
    for function in called:
        told = [] if named else [json.dumps(function["name"])[1:] + _ARGUMENTS]
        rows.append([*told, function.get("parameters") or {"type": "object"}, "}"])  # the end of the answer closes it
    try:
        return text_grammar(rows)
    except ValueError as error:
        fields.refuse("tools", f"cannot be followed strictly: {error}")


def with_read_arguments(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as templates want it: the arguments of its calls are objects, not their JSON."""
    calls = []
    given: list[Any] = message["tool_calls"] if isinstance(message["tool_calls"], list) else [None]
    for call in given:
        if _name_of(call) is None:
            raise ApiError(f'{where}.tool_calls: must be a list of {{type: "function", function: {{name: …}}}}.', where)
        function = dict(call["function"])
        try:
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise ApiError(f"{where}.tool_calls: arguments of {function['name']} are not JSON.", where) from error
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


class ToolText:
    """One answer's text, split into what is said and which tools are called. What is no call after all is said."""

    def __init__(self, begun: str) -> None:
        """`begun` is the beginning that was put into the answer's mouth."""
        self._held = begun
        self.calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """What is sure by now: text, and calls as the API words them. White space around calls is dropped."""
        self._held += text
        said, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0 and not last:
                break
            stop = len(self._held) if end < 0 else end + len(CLOSE)
            call = _call(self._held[start + len(OPEN) : stop if end < 0 else end])
            said += self._held[:stop] if call is None else self._held[:start].rstrip()
            if call is not None:
                calls.append({"index": self.calls, **call})
                self.calls += 1
            self._held = self._held[stop:]
        if last:
            rest, self._held = self._held, ""
            return said + (rest.rstrip() if self.calls else rest), calls
        sure = self._held[: start if start >= 0 else len(self._held) - _begun(self._held)].rstrip()
        self._held = self._held[len(sure) :]
        return said + sure, calls


def _begun(text: str) -> int:
    """How many characters at the end may begin a call."""
    return next((count for count in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:count])), 0)


def _call(text: str) -> dict[str, Any] | None:
    call = json_call(text)
    if call.error is not None:
        return None
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _name_of(tool: Any) -> str | None:
    """The name in {type: "function", function: {name: …}}; None: it is not that."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None
