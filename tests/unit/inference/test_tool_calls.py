"""Calls of tools in an answer's text: the same however the text is cut, and never half a tag."""

from __future__ import annotations

import json

import pytest

from verl.inference.serving.tool_calls import ToolCallSplitter

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'


def read(pieces, begun=""):
    """(what was said, [(index, name, arguments)]) of an answer in pieces."""
    text, said, calls = ToolCallSplitter(begun), "", []
    for number, piece in enumerate(pieces):
        more, found = text.push(piece, last=number == len(pieces) - 1)
        said += more
        calls += [(call["index"], call["function"]["name"], call["function"]["arguments"]) for call in found]
    assert text.num_calls == len(calls)
    return said, calls


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ("Hello there. ", "Hello there. ", []),
        (CALL, "", ["f"]),
        (f"One moment.\n\n{CALL}\n", "One moment.", ["f"]),
        (f"{CALL}\n{CALL}", "", ["f", "f"]),
        (f"{CALL}\nand then", "\nand then", ["f"]),
        ('<tool_call>{"name": "g"}', "", ["g"]),  # the closing tag was an end token
        ('<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", ["g"]),
        ("<tool_call>not JSON</tool_call> ", "<tool_call>not JSON</tool_call> ", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (f"<tool_call>no</tool_call>{CALL}", "<tool_call>no</tool_call>", ["f"]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("", "", []),
    ],
)
def test_calls_are_found_and_the_rest_is_said(text, said, names):
    found = read([text])
    assert (found[0], [name for _, name, _ in found[1]]) == (said, names)
    assert [index for index, _, _ in found[1]] == list(range(len(names)))
    if len(text) < 1000:
        for cut in range(len(text)):
            assert read([text[:cut], text[cut:]]) == found
        assert read([*text, ""]) == found


def test_arguments_are_told_as_json():
    assert json.loads(read([CALL])[1][0][2]) == {"x": [1, "é"]}


def test_nothing_that_may_be_a_call_is_said_before_that_is_known():
    text = ToolCallSplitter("")
    assert text.push("Yes. <too", last=False) == ("Yes.", [])
    assert text.push("ls>", last=False) == (" <tools>", [])


def test_a_call_may_have_been_begun_for_the_model():
    begun = '<tool_call>\n{"name": "f", "arguments": '
    assert read(['{"x"', ": 1}}\n</tool_call>"], begun) == ("", [(0, "f", '{"x": 1}')])
