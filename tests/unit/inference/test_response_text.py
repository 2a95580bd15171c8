"""Tool calls and detokenised text are the same however a response is cut; never half a tag or a character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import tiny_tokenizer
from verl.inference.serving.response_text import TextStream, ToolCallSplitter

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


TOKENIZER = tiny_tokenizer()
TEXTS = st.text(alphabet="ab é€😀�", max_size=12)
CUTS = st.lists(st.integers(1, 4), max_size=30)


def pieces(stream, ids, sizes):
    told = []
    while ids:
        size = sizes.pop() if sizes else 1
        told.append(stream.push(ids[:size]))
        ids = ids[size:]
    return [*told, stream.finish()]


@given(TEXTS, CUTS)
def test_pieces_are_the_text_and_hold_whole_characters_only(text, sizes):
    told = pieces(TextStream(TOKENIZER), TOKENIZER.encode(text), sizes)
    assert "".join(told) == text
    assert all("�" not in piece for piece in told) or "�" in text


@given(st.lists(st.integers(0, 260), max_size=20), CUTS)
def test_any_tokens_give_what_decoding_all_of_them_gives(ids, sizes):
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(TextStream(TOKENIZER), ids, sizes)) == whole


@given(TEXTS, st.text(alphabet="ab é", min_size=1, max_size=4), CUTS)
def test_text_ends_before_the_stop_string_and_nothing_of_it_is_told(text, stop, sizes):
    stream = TextStream(TOKENIZER, [stop])
    told = pieces(stream, TOKENIZER.encode(text), sizes)
    assert "".join(told) == text.partition(stop)[0]
    assert stream.stopped == (stop if stop in text else None)


def test_text_that_may_begin_a_stop_string_waits_for_what_comes():
    stream = TextStream(TOKENIZER, ["</end>", "\n\n"])
    assert [stream.push(TOKENIZER.encode(part)) for part in ("x</", "en", "a\n", "y")] == ["x", "", "</ena", "\ny"]
    assert stream.finish() == ""


@pytest.fixture
def metaspace_tokenizer():
    """Spaces belong to the words after them, and bytes stand for characters it does not know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁Paris", "▁is", "▁big", *(f"<0x{byte:02X}>" for byte in "é€".encode())]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<unk>")


def test_a_continued_text_keeps_the_space_before_its_first_word(metaspace_tokenizer):
    ids = [1, 2, 3]
    assert "".join(pieces(TextStream(metaspace_tokenizer, context=[1]), ids[1:], [])) == " is big"
    assert "".join(pieces(TextStream(metaspace_tokenizer), ids, [])) == "Paris is big"


def test_characters_made_of_byte_tokens_come_whole(metaspace_tokenizer):
    assert pieces(TextStream(metaspace_tokenizer), [1, 4, 5, 6, 7, 8, 2], []) == [
        "Paris", "", "é", "", "", "€", " is", ""
    ]  # fmt: skip
