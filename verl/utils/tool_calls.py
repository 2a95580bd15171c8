"""Parsers of the tool calls that models write: one class per format (`multi_turn.format`).

Every parser takes time linear in the length of the text, whatever the model has written. To add a format, write its
class below the others and add its row to `verl.config.names.TOOL_FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.config.names import TOOL_FORMAT_SYNONYMS, TOOL_FORMATS
from verl.utils.registry import Registry

__all__ = ["HERMES_CLOSE", "HERMES_OPEN", "Parser", "Schemas", "ToolCall", "get_parser", "parse_json_call"]

Schemas = Sequence[Mapping[str, Any]]
"""Tools in the format of the OpenAI API: {type: function, function: {name, parameters}}."""

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
_THINK_END = "</think>"
# A call that is not valid JSON usually still names its tool; the error message to the model mentions it.
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})')
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a model."""

    name: str
    arguments: str
    """A JSON object; if `error` is set, the text that was found instead."""
    error: str | None = None
    """Why the call is not valid, as a message to the model."""


class Parser(Protocol):
    """Parser of one format."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        """Return the text outside of the calls, and the calls in order.

        `text` is one turn with its special tokens, without its end token. `schemas` are those of the tools: formats
        that write all values as text take the types from there.
        """
        ...


def get_parser(format: str) -> Parser:
    """Return the parser of a format; ValueError lists the known formats."""
    return _PARSERS.lookup(TOOL_FORMAT_SYNONYMS.get(format, format))()


_PARSERS: Registry[type[Parser]] = Registry("actor_rollout_ref.rollout.multi_turn.format", TOOL_FORMATS)


class HermesParser:
    """Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        content, bodies = _split_calls(text, HERMES_OPEN, HERMES_CLOSE)
        return content, [parse_json_call(body) for body in bodies]


class OpenAIParser:
    """gpt-oss (harmony): a message with a recipient, <|channel|>commentary to=functions.name<|message|>{…}<|call|>."""

    _end = re.compile(r"<\|(?:end|call|return)\|>")
    _recipient = re.compile(r"\bto=([^\s<]+)")

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        """The text does not include the analysis channel."""
        content, calls = [], []
        for message in text.split("<|start|>"):
            header, marker, rest = message.partition("<|message|>")
            body = self._end.split(rest if marker else header, maxsplit=1)[0]
            recipient = self._recipient.search(header) if marker else None
            if recipient is not None:
                calls.append(_parse_arguments(recipient.group(1).removeprefix("functions."), body))
            elif not header.partition("<|channel|>")[2].startswith("analysis"):
                content.append(body)
        return "".join(content), calls


class Qwen3CoderParser:
    """Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call> in lines."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        content, bodies = _split_calls(text, "<tool_call>", "</tool_call>")
        return content, [self._call(body, schemas) for body in bodies]

    def _call(self, body: str, schemas: Schemas) -> ToolCall:
        before, marker, rest = body.partition("<function=")
        name, closed, parameters = rest.partition(">")
        if before.strip() or not marker or not closed:
            expected = "it must be <function=name> with a <parameter=key> for each value"
            return ToolCall("", body, f"Invalid tool call: {expected}")
        values = []
        for part in parameters.partition("</function>")[0].split("<parameter=")[1:]:
            key, closed, value = part.partition(">")
            if not closed:
                expected = "write <parameter=key>value"
                return ToolCall(name, body, f"Invalid parameter in arguments for '{name[:64]}': {expected}")
            # One line break before and after the value separates it from its tags.
            value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
            values.append((key.strip(), value))
        return _untyped_call(name.strip(), values, schemas)


class Llama3JsonParser:
    """Llama 3: the whole response is {"name": …, "parameters": {…}}, or follows <|python_tag|>; ; separates calls."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        content, tagged, calls = text.partition("<|python_tag|>")
        if not tagged:
            content, calls = "", text
        calls = calls.strip()
        # Without the tag, an object that names no tool is a response in JSON.
        if not tagged and not (calls.startswith("{") and '"name"' in calls):
            return text, []
        return content, [parse_json_call(part) for part in self._split_objects(calls)]

    def _split_objects(self, text: str) -> list[str]:
        """The consecutive JSON objects of a text; from the first invalid one on, the remaining text."""
        decoder, parts, at = json.JSONDecoder(), [], 0
        while at < len(text):
            try:
                end = decoder.raw_decode(text, at)[1]
            except (ValueError, RecursionError):
                end = len(text)
            parts.append(text[at:end])
            while end < len(text) and text[end] in "; \n\t,":
                end += 1
            at = end
        return parts


class GlmParser:
    """GLM 4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        content, bodies = _split_calls(text, "<tool_call>", "</tool_call>")
        return content, [self._call(body, schemas) for body in bodies]

    def _call(self, body: str, schemas: Schemas) -> ToolCall:
        name, *pairs = body.split("<arg_key>")
        name, values = name.strip(), []
        for pair in pairs:
            key, marker, value = pair.partition("<arg_value>")
            if not marker:
                expected = "write <arg_key>key</arg_key><arg_value>value</arg_value>"
                return ToolCall(name, body, f"Invalid pair in arguments for '{name[:64]}': {expected}")
            values.append((key.partition("</arg_key>")[0].strip(), value.partition("</arg_value>")[0]))
        if not name:
            return ToolCall("", body, "Invalid tool call: it must begin with the tool's name")
        return _untyped_call(name, values, schemas)


class KimiParser:
    """Kimi K2: a section of <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        content, sections = _split_calls(text, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        calls = (_split_calls(section, "<|tool_call_begin|>", "<|tool_call_end|>")[1] for section in sections)
        return content, [self._call(body) for bodies in calls for body in bodies]

    def _call(self, body: str) -> ToolCall:
        separator = "<|tool_call_argument_begin|>"
        name, separated, arguments = body.partition(separator)
        name = name.strip().removeprefix("functions.").partition(":")[0]
        if not separated:
            return ToolCall(name, body, f"Invalid tool call of '{name[:64]}': it has no {separator}")
        return _parse_arguments(name, arguments)


class DeepSeekParser:
    """DeepSeek V3, R1 and V3.1: a section of <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        content, sections = _split_calls(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        calls = (_split_calls(section, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")[1] for section in sections)
        return content, [self._call(body) for bodies in calls for body in bodies]

    def _call(self, body: str) -> ToolCall:
        separator = "<｜tool▁sep｜>"
        name, separated, arguments = body.partition(separator)
        if not separated:
            return ToolCall("", body, f"Invalid tool call: it has no {separator} between name and arguments")
        if name.strip() == "function":  # V3 and R1 write the type, then the name, then fenced arguments
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        return _parse_arguments(name.strip(), arguments)


class GemmaParser:
    """Gemma 4 and FunctionGemma: call:name{key:value} with bare keys and special quotes.

    Gemma 4 writes <|tool_call>call:f{city:<|"|>Bonn<|"|>,days:3}<tool_call|>, FunctionGemma the same with <escape> as
    quote and <start_function_call>, <end_function_call> around calls.
    """

    _tags = (("<|tool_call>", "<tool_call|>", '<|"|>'), ("<start_function_call>", "<end_function_call>", "<escape>"))
    _key = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start, end, quote = next((tags for tags in self._tags if tags[0] in text), self._tags[0])
        content, bodies = _split_calls(text, start, end)
        return content, [self._call(body, quote) for body in bodies]

    def _call(self, body: str, quote: str) -> ToolCall:
        head, brace, rest = body.strip().partition("{")
        kind, _, name = head.partition(":")
        if kind.strip() != "call" or not brace:
            return ToolCall(name.strip(), body, "Invalid tool call: it must be call:name{key:value}")
        # Every second part is a quoted string; the keys of the others get quotes.
        parts = (brace + rest).split(quote)
        quoted = [
            json.dumps(part) if number % 2 else self._key.sub(r'\1"\2":', part) for number, part in enumerate(parts)
        ]
        return _parse_arguments(name.strip(), "".join(quoted))


def _split_calls(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """Return the text outside of the markers and the bodies between them; the last body may lack its end marker.

    Markers before `</think>` are part of the text. White space around calls is dropped.
    """
    thought, mark, response = text.rpartition(_THINK_END)
    content, bodies, at = [thought, mark], [], 0
    while (begin := response.find(start, at)) >= 0:
        content.append(response[at:begin].rstrip())
        stop = response.find(end, begin + len(start))
        stop = len(response) if stop < 0 else stop
        bodies.append(response[begin + len(start) : stop])
        at = stop + len(end)
    rest = response[at:]
    return "".join([*content, rest.rstrip() if bodies else rest]), bodies


def parse_json_call(text: str) -> ToolCall:
    """Parse {"name": …, "arguments": {…}}; some models write parameters instead of arguments."""
    try:
        call = _load_json(text)
    except ValueError as error:
        match = _NAME.search(text)
        return _invalid_call(match.group(1) if match else "", text, str(error))
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _invalid_call("", text, 'a call is {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        return _parse_arguments(call["name"], arguments)
    return _checked_call(call["name"], {} if arguments is None else arguments, text)


def _parse_arguments(name: str, arguments: str) -> ToolCall:
    """Return the call of a tool with arguments as JSON text; empty text is an empty object."""
    try:
        return _checked_call(name, _load_json(arguments) if arguments.strip() else {}, arguments)
    except ValueError as error:
        return _invalid_call(name, arguments, str(error))


def _untyped_call(name: str, values: Iterable[tuple[str, str]], schemas: Schemas) -> ToolCall:
    """Return the call of a tool whose arguments are (key, text) pairs; the schema has the types."""
    types = next((_parameter_types(tool) for tool in schemas if tool.get("function", {}).get("name") == name), {})
    return _checked_call(name, {key: _typed_value(text, types.get(key)) for key, text in values}, "")


def _typed_value(text: str, types: Sequence[str] | None) -> Any:
    """Text if the schema allows a string; otherwise JSON if it is valid, else text."""
    if types is not None and "string" in types:
        return text
    if text in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[text]
    try:
        return _load_json(text)
    except ValueError:
        return text


def _parameter_types(tool: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The JSON types of each parameter that declares them."""
    properties = tool["function"].get("parameters", {}).get("properties", {})
    declared = {name: _declared_types(schema) for name, schema in properties.items()}
    return {name: types for name, types in declared.items() if types}


def _declared_types(schema: Any) -> list[str]:
    """The JSON types that a schema and its alternatives declare; a schema may also be a boolean."""
    if not isinstance(schema, Mapping):
        return []
    types = schema.get("type") or []
    alternatives = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return [
        *([types] if isinstance(types, str) else types),
        *(kind for part in alternatives for kind in _declared_types(part)),
    ]


def _checked_call(name: str, arguments: Any, text: str) -> ToolCall:
    if not isinstance(arguments, dict):
        return _invalid_call(name, text, "they must be an object, {…}")
    return ToolCall(name, _dump_json(arguments))


def _invalid_call(name: str, text: str, why: str) -> ToolCall:
    return ToolCall(name, text, f"Invalid JSON in arguments for '{name[:64]}': {why}")


def _load_json(text: str) -> Any:
    """Parse strict JSON (without NaN and infinities); ValueError for any other text."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not valid JSON")


def _dump_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair is valid in JSON and not in UTF-8
        return json.dumps(value)
    return text
