"""Stop strings are found at the token that completes them, on real tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.tiny import tiny_tokenizer
from verl.inference.constraints import StopStringChecker

TOKENIZER = tiny_tokenizer()
STOPS = ["ab", "é", "😀", "a😀b", "\n\n", "<|user|>", "b ", "aaa"]


def spaces_tokenizer():
    """Words with the space in front, which the decoder drops at the beginning of a text; bytes for what has no word."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "▁the", "▁", "end", "▁end", "ing", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")


SPACES = spaces_tokenizer()


def stopped_at(check: StopStringChecker, token_ids: list[int]) -> int | None:
    """How many tokens an answer keeps that goes through `check` token by token."""
    return next((n for n in range(1, len(token_ids) + 1) if check.completed_by_last(token_ids[:n])), None)


def first_with(tokenizer, stops: list[str], token_ids: list[int]) -> int | None:
    """The same, by decoding everything from the start each time."""
    texts = (tokenizer.decode(token_ids[:n], skip_special_tokens=False) for n in range(1, len(token_ids) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("say </answer> more", "</answer>", "say </answer>"),
        ("größer", "ß", "größ"),
        ("x😀y", "😀", "x😀"),
        ("aab", "ab", "aab"),
        ("one\n\ntwo", "\n\n", "one\n\n"),
        ("nothing here", "zzz", None),
    ],
)
def test_an_answer_ends_with_the_byte_that_completes_the_string(text, stop, kept):
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    found = stopped_at(StopStringChecker(TOKENIZER, (stop,)), tokens)
    assert found == (None if kept is None else len(kept.encode()))


def test_the_text_of_a_special_token_can_be_the_string():
    tokens = [*TOKENIZER.encode("hi", add_special_tokens=False), 3, 70, 71]
    assert stopped_at(StopStringChecker(TOKENIZER, ("<|user|>",)), tokens) == 3


def test_a_string_that_was_complete_before_is_not_completed_again():
    check = StopStringChecker(TOKENIZER, ("a", "bc"))
    tokens = TOKENIZER.encode("a..a", add_special_tokens=False)
    assert [check.completed_by_last(tokens[:n]) for n in range(1, 5)] == [True, False, False, True]


@settings(max_examples=50)
@given(
    text=st.lists(st.sampled_from([*"ab \n", "é", "😀", "\udce2", "<|user|>"]), max_size=14),
    stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
)
def test_bytes_one_by_one_are_stopped_where_the_whole_text_first_holds_a_string(text, stops):
    # "\udce2" stands for the byte 0xE2 alone, which is no character.
    broken = TOKENIZER.encode("’", add_special_tokens=False)[0]
    tokens = []
    for piece in text:
        tokens += [broken] if piece == "\udce2" else TOKENIZER.encode(piece, add_special_tokens=False)
    assert stopped_at(StopStringChecker(TOKENIZER, stops), tokens) == first_with(TOKENIZER, stops, tokens)


@settings(max_examples=50)
@given(
    tokens=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, *(7 + byte for byte in "é e".encode())]), max_size=12),
    stops=st.lists(st.sampled_from([" end", "the end", "ending.", " ", "é", "d the", ". "]), min_size=1, max_size=2),
)
@example(tokens=[7 + byte for byte in "é ".encode()], stops=[" "])  # the last two bytes alone are no text
@example(tokens=[7 + byte for byte in b"\xa9  "], stops=[" "])  # nor are all three: nobody ever reads these spaces
def test_words_with_leading_spaces_are_stopped_where_the_whole_text_first_holds_a_string(tokens, stops):
    assert stopped_at(StopStringChecker(SPACES, stops), tokens) == first_with(SPACES, stops, tokens)
