"""Parsers of tool calls: what each family's chat template writes is read, and what is no call comes back in words."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config import names
from verl.utils.tool_calls import get_parser

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}},
            },
        },
    }
]
ARGUMENTS = {"city": 'Köln "5"\nam Rhein', "days": 3, "units": ["C", {"wind": "km/h"}]}
JSON = json.dumps(ARGUMENTS)


def gemma(value):
    """As Gemma's templates write a value."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def qwen3_coder(arguments):
    inside = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>"


def glm(arguments, line="\n"):
    pairs = "".join(
        f"{line}<arg_key>{key}</arg_key>{line}<arg_value>{plain(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_call>weather{pairs}{line}</tool_call>"


WRITE = {
    "hermes": lambda a: f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(a)}}}\n</tool_call>',
    "openai": lambda a: (
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{json.dumps(a)}<|call|>"
    ),
    "qwen3_coder": qwen3_coder,
    "llama3_json": lambda a: f'{{"name": "weather", "parameters": {json.dumps(a)}}}',
    "glm": glm,
    "kimi": lambda a: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{json.dumps(a)}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek": lambda a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "gemma": lambda a: f"<|tool_call>call:weather{gemma(a)}<tool_call|>",
}


def calls_of(name, text):
    said, calls = get_parser(name).parse(text, SCHEMAS)
    assert all(call.error is None for call in calls), calls
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


def test_every_format_has_a_parser_and_a_case_here():
    assert WRITE.keys() == names.TOOL_FORMATS.keys()
    assert type(get_parser("qwen")) is type(get_parser("hermes"))
    with pytest.raises(ValueError, match=r"(?s)multi_turn.format.*'hermis'.*'hermes'"):
        get_parser("hermis")


@pytest.mark.parametrize("name", WRITE)
def test_what_the_template_writes_is_read(name):
    assert calls_of(name, WRITE[name](ARGUMENTS)) == ("", [("weather", ARGUMENTS)])
    assert calls_of(name, WRITE[name]({})) == ("", [("weather", {})])


@pytest.mark.parametrize("name", WRITE)
def test_parallel_calls_keep_their_order(name):
    separator = "; " if name == "llama3_json" else "\n"
    text = separator.join(WRITE[name]({"days": day}) for day in range(3))
    assert calls_of(name, text)[1] == [("weather", {"days": day}) for day in range(3)]


@pytest.mark.parametrize("name", [name for name in WRITE if name not in ("openai", "llama3_json")])
def test_text_beside_calls_is_said_and_calls_that_are_only_thought_of_are_not_made(name):
    call = WRITE[name](ARGUMENTS)
    assert calls_of(name, f"<think>{call}</think>Let me see.\n\n{call}\n")[1] == [("weather", ARGUMENTS)]
    assert calls_of(name, f"<think>{call}</think>Let me see.\n\n{call}\n")[0] == f"<think>{call}</think>Let me see."


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("text", ["", "Hello < there.\n", '{"answer": 4}', "<tool>{}</tool>"])
def test_text_without_calls_stays_as_it_is(name, text):
    assert calls_of(name, text) == (text, [])


def test_harmony_says_the_final_channel_and_keeps_thoughts_apart():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{JSON}"
    )
    assert calls_of("openai", text) == ("Wait.", [("weather", ARGUMENTS)])
    assert calls_of(
        "openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4"
    ) == (
        "4",
        [],
    )


def test_other_spellings_of_the_same_families():
    assert calls_of("glm", glm(ARGUMENTS, line=""))[1] == [("weather", ARGUMENTS)]
    older = WRITE["deepseek"](ARGUMENTS).replace("weather<｜tool▁sep｜>", "function<｜tool▁sep｜>weather\n```json\n")
    older = older.replace("<｜tool▁call▁end｜>", "\n```<｜tool▁call▁end｜>")
    assert calls_of("deepseek", older)[1] == [("weather", ARGUMENTS)]
    small = WRITE["gemma"](ARGUMENTS).replace('<|"|>', "<escape>")
    small = small.replace("<|tool_call>", "<start_function_call>").replace("<tool_call|>", "<end_function_call>")
    assert calls_of("gemma", small) == ("", [("weather", ARGUMENTS)])
    assert calls_of("llama3_json", f'Wait.<|python_tag|>{{"name": "weather", "parameters": {JSON}}}') == (
        "Wait.",
        [("weather", ARGUMENTS)],
    )
    assert calls_of("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(JSON)}}}') == (
        "",
        [("weather", ARGUMENTS)],
    )


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_values_without_types_take_them_from_the_schema(name):
    written = WRITE[name]({"city": "12", "days": 12, "units": [], "other": True, "more": "x"})
    ((_, found),) = calls_of(name, written)[1]
    assert found == {"city": "12", "days": 12, "units": [], "other": True, "more": "x"}
    assert json.loads(get_parser(name).parse(written)[1][0].arguments)["city"] == 12
    assert calls_of(name, written.replace("true", "True"))[1] == [("weather", found)]  # as Python writes it


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_types_of_alternatives_are_read_and_a_schema_may_be_a_boolean(name):
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {"city": optional, "days": {"oneOf": [{"type": "integer"}]}, "units": True}
    function = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
    written = WRITE[name]({"city": "12", "days": 12, "units": 3})
    (call,) = get_parser(name).parse(written, [{"type": "function", "function": function}])[1]
    assert json.loads(call.arguments) == {"city": "12", "days": 12, "units": 3}


MALFORMED = {
    "hermes": ('<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>', "weather", "Expecting value"),
    "openai": ("<|channel|>commentary to=functions.weather<|message|>{city}", "weather", "Expecting property name"),
    "qwen3_coder": ("<tool_call>weather(city)</tool_call>", "", "it must be <function=name>"),
    "llama3_json": ('{"name": "weather", "parameters": {"city": Bonn}}', "weather", "Expecting value"),
    "glm": ("<tool_call>weather<arg_key>city</arg_key></tool_call>", "weather", "write <arg_key>key</arg_key>"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0",
        "weather",
        "it has no <|tool_call_arg",
    ),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather", "", "it has no <｜tool▁sep｜>"),
    "gemma": ("<|tool_call>call:weather{city:Bonn}<tool_call|>", "weather", "Expecting value"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_says_what_is_wrong(name):
    text, tool, words = MALFORMED[name]
    (call,) = get_parser(name).parse(text, SCHEMAS)[1]
    assert call.name == tool
    assert words in call.error
    if "Expecting" in words:
        assert call.error.startswith("Invalid JSON in arguments for 'weather': ")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[1]", "Invalid JSON in arguments for '': a call is"),
        ('{"name": 3}', "a call is"),
        ('{"name": "f", "arguments": [1]}', "Invalid JSON in arguments for 'f': they must be an object"),
        ('{"name": "f", "arguments": "x"}', "Invalid JSON in arguments for 'f': Expecting value"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not valid JSON"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 100_000, "Invalid JSON in arguments for 'f': "),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "Invalid JSON in arguments for 'f': "),
    ],
)
def test_what_json_cannot_say_is_no_call(body, words):
    (call,) = get_parser("hermes").parse(f"<tool_call>{body}</tool_call>")[1]
    assert words in call.error
    assert len(call.error) < 300


def test_arguments_can_always_be_sent_on():
    (call,) = get_parser("hermes").parse(r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>')[1]
    assert json.loads(call.arguments.encode()) == {"x": "\ud800"}


@pytest.mark.parametrize("name", WRITE)
def test_hostile_text_costs_time_in_proportion_to_its_length(name):
    """Megabytes of every marker, alone and together, opened and never closed."""
    call = WRITE[name]({"days": 3})
    pieces = [call[: len(call) // part] for part in (1, 2, 3)]
    pieces += [mark for mark in ("<tool_call>", '<tool_call>{"a":[', '{"name":', "<|start|>", "call:x{", "</think>")]
    pieces += [call[:-3], '<|"|>,', "<arg_key>", "<parameter=", "to=", "to=x<|message|>"]
    begun = time.perf_counter()
    for piece in pieces:
        get_parser(name).parse(piece * (500_000 // len(piece)))
    assert time.perf_counter() - begun < 30  # ends at all: squared, one of these alone takes minutes


@pytest.mark.parametrize("name", WRITE)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "{",
                "}",
                '"name"',
                ":",
                '"f"',
                ",",
                '"arguments"',
                "<function=f>",
                "<|start|>",
            ]
            + ["<parameter=x>", "<arg_key>", "<arg_value>", "call:f{", '<|"|>', "<|message|>", "to=f", "1", "</think>"]
            + [
                "<|tool_call>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<|python_tag|>",
                "\n",
            ]
            + ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", ";", "x"]
        ),
        max_size=25,
    )
)
def test_any_text_is_read_to_calls_that_are_json_or_say_why_not(name, pieces):
    said, calls = get_parser(name).parse("".join(pieces))
    assert isinstance(said, str)
    for call in calls:
        assert call.error or isinstance(json.loads(call.arguments), dict)
