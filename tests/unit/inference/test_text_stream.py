"""TextStream: the pieces are the whole text, whatever the cuts; no half characters, no stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import tiny_tokenizer
from verl.inference.serving.text_stream import TextStream

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
