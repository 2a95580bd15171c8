"""End tokens of every model family: the tokens fed at the next turn are those of the whole rendered conversation."""

from __future__ import annotations

import json

import pytest

from tests.support.chat_models import FAMILIES, chat_tokenizer
from tests.support.family_turns import (
    TOOL,
    TOOLS,
    USER,
    Conversation,
    all_cases,
    family_chat,
    rounds_of,
    template_kwargs,
)
from verl.agent.chat import Chat
from verl.agent.chat_check import check_template
from verl.utils.end_tokens import find_end_tokens
from verl.utils.tool_calls import get_parser
from verl.utils.turn_template import TurnTemplate

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tokens_fed_are_those_of_the_rendered_conversation(case):
    kind, chat, conversation = (
        FAMILIES[case.family],
        family_chat(case.family, case.tools, case.thinking),
        Conversation(case),
    )
    ids = chat.prompt_ids(conversation.messages)
    end = [] if case.end is None else chat.encode(case.end)
    own = True
    for number, replies in enumerate(rounds_of(case, kind)):
        turn, said, message = conversation.model_turn(number, replies)
        before, both = conversation.encode(conversation.text), conversation.encode(conversation.text + turn)
        sampled = both[len(before) :] + end
        assert both[: len(before)] == before
        content = chat.decode(chat.strip_end_token(sampled))
        assert "".join(content.split()) == "".join(turn.split())
        ids += sampled + chat.suffix(replies, sampled)
        own &= case.end == conversation.template_end(message)
        conversation.add(turn, said, message, chat.style.to_template_format(replies), case.end)
        if kind.format and "tool_calls" in message:
            calls = get_parser(kind.format).parse(content, [])[1]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                ("weather", {"city": f"Fine {number} city"}) for _ in message["tool_calls"]
            ]
    assert chat.decode(ids) == chat.decode(conversation.encode(conversation.text))
    if kind.end or kind.stops != [kind.eos] or case.end:  # plain text after a cut turn may merge with its last token
        assert ids == conversation.encode(conversation.text)
    if own and not conversation.rewritten:
        assert conversation.text == conversation.rendered


def test_the_cases_cover_at_least_fifteen_families():
    assert len(FAMILIES) >= 15
    assert len(CASES) > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_the_strict_check_accepts_every_family(family):
    for tools in (False, True):
        for thinking in FAMILIES[family].thinking or (None,):
            check_template(family_chat(family, tools, thinking), "strict")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_names_the_end_tokens_that_the_model_samples(family):
    """Never a token that stands inside a turn: gpt-oss ends its thinking with <|end|> and continues."""
    tokenizer, kind = chat_tokenizer(family), FAMILIES[family]
    for thinking in kind.thinking or (None,):
        named = find_end_tokens(None, None, tokenizer, template_kwargs(family, thinking)).ids
        tokens = set(tokenizer.convert_ids_to_tokens(sorted(named)))
        assert tokens <= set(kind.stops)
        own = kind.end if kind.end in kind.stops else None
        assert {token for token in (kind.eos, own, kind.call_end) if token} <= tokens


class Duplicating(Chat):
    """Closes a turn although the model has ended it with another token."""

    def suffix(self, messages, turn=()):
        return super().suffix(messages, () if turn and turn[-1] != self.encode("<|eot_id|>")[0] else turn)


class Losing(Chat):
    """Takes the next role token for the end token of the turn."""

    def suffix(self, messages, turn=()):
        suffix = super().suffix(messages)
        return suffix[1:] if turn and turn[-1] in self.end_ids else suffix


class Leaking(Chat):
    """Writes the end of the probe's tool call once more."""

    def suffix(self, messages, turn=()):
        return self.encode("</tool_call>") * (messages[0]["role"] == "tool") + super().suffix(messages, turn)


@pytest.mark.parametrize(
    ("family", "broken", "words"),
    [
        ("llama3", Duplicating, r"<\|eom_id\|>|<\|end_of_text\|>"),
        ("glm4", Losing, r"<\|endoftext\|>"),
        ("vicuna", Leaking, "a tool"),
    ],
)
def test_the_strict_check_finds_duplicated_lost_and_leaked_tokens(family, broken, words):
    tokenizer = chat_tokenizer(family)
    chat = broken(tokenizer, TOOLS, tokenizer.convert_tokens_to_ids(FAMILIES[family].stops))
    with pytest.raises(ValueError, match=rf"tokenization_sanity_check_mode = strict: .*{words}.*\(different text\)"):
        check_template(chat, "strict")


@pytest.mark.parametrize(
    ("family", "template", "wrong"),
    [
        ("command_r7b", None, "<|END_RESPONSE|>"),
        ("phi3", "alternating", "<|user|>"),
        ("glm4", None, "<|user|>"),
        ("gpt_oss", None, ""),
        ("gpt_oss", None, "<|start|>"),
        ("qwen2_5", None, ""),
        ("qwen2_5", None, "<|im_start|>"),
    ],
)
def test_the_strict_check_finds_a_wrongly_detected_end_token(family, template, wrong, monkeypatch):
    tokenizer, kwargs = chat_tokenizer(family), {"chat_template": ALTERNATING} if template else {}
    stops = tokenizer.convert_tokens_to_ids(FAMILIES[family].stops)
    monkeypatch.setattr(TurnTemplate, "find_end", lambda *_: wrong)
    chat = Chat(tokenizer, None, stops, **kwargs)
    with pytest.raises(ValueError, match=r"tokenization_sanity_check_mode = strict: .*\(different text\)"):
        check_template(chat, "strict")


# The end token is written after the last answer only, and roles must alternate.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role=='user') != (loop.index0%2==0) %}{{ raise_exception('x') }}{% endif %}"
    "<|{{m.role}}|>\n{{m.content}}{% if loop.last and m.role=='assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GENERIC = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}"
    "{% if loop.last and m.role=='assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("family", "template", "opening"),
    [
        ("phi3", ALTERNATING, "<|user|>"),
        ("phi3", ALTERNATING.replace("!= (loop", "== (not loop").replace("raise_exception('x')", "''"), "<|user|>"),
        ("qwen2_5", GENERIC, "<|im_start|>"),
    ],
    ids=["alternating", "any order", "one role token"],
)
def test_an_end_token_only_on_the_last_turn_does_not_remove_the_next_role_token(family, template, opening):
    chat = Chat(chat_tokenizer(family), chat_template=template)
    for last in ("<|endoftext|>", "."):
        suffix = chat.suffix(USER, chat.encode(f"Fine{last}"))
        assert suffix[0] == chat.encode(opening)[0]
    assert check_template(chat, "strict") == []


def test_an_earlier_end_token_of_an_alternating_template_is_kept():
    """Earlier answers end with <|end|>, the last one with <|endoftext|>; user messages have no end token."""
    template = ALTERNATING.replace("{% endif %}{% endfor", "{% elif m.role=='assistant' %}<|end|>{% endif %}{% endfor")
    chat = Chat(chat_tokenizer("phi3"), chat_template=template)
    for last, first in (("<|endoftext|>", "<|user|>"), (".", "<|end|>")):
        assert chat.suffix(USER, chat.encode(f"Fine{last}"))[0] == chat.encode(first)[0]
    assert check_template(chat, "strict") == []


def test_of_several_closing_tokens_only_the_last_ends_a_turn():
    chat = family_chat("command_r7b", False, None)
    inner, end = chat.encode("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")
    assert end in chat.end_ids
    assert inner not in chat.end_ids
    assert end not in chat.suffix(USER, [5, inner, end])[:1]
    assert chat.suffix(USER, [5, inner])[0] == end


def test_a_stop_token_that_is_text_does_not_end_a_turn():
    tokenizer = chat_tokenizer("qwen2_5")
    call_end, end = tokenizer.convert_tokens_to_ids(["</tool_call>", "<|im_end|>"])
    found = find_end_tokens(
        None, None, tokenizer, stop_token_ids=[call_end, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    )
    assert call_end in found.ids
    assert call_end not in found.turn_ids
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") in found.turn_ids
    chat = Chat(tokenizer, TOOLS, found.turn_ids)
    assert chat.strip_end_token([5, call_end]) == [5, call_end]
    assert chat.suffix(TOOL, [5, call_end])[0] == end
