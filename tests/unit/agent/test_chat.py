"""Chat: what is appended turn by turn has the tokens of the template applied to the whole conversation."""

from __future__ import annotations

import copy
import re

import pytest

from tests.support.chat_models import FAMILIES, GPT2, chat_tokenizer
from tests.support.tiny import tiny_tokenizer
from verl.agent import chat as chat_module
from verl.agent.chat import Chat, ChatSettings, encode_replies, tool_message
from verl.agent.chat_check import check_template
from verl.utils.tokenizer import SHORT_TEXT

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of today.", "parameters": PARAMETERS}}]
HARD = 'Köln:\n\n 5 °C ,  "ok"\t\n'
USER = [{"role": "user", "content": "And now?"}]
TOOL = [tool_message("weather", HARD)]
BOTH = [tool_message("weather", "cold"), tool_message("weather", HARD, 1)]
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "How warm is it?"}


def call_of(message):
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    return {"id": message["tool_call_id"], "type": "function", "function": function}


def answer_to(replies, text="Let me see."):
    calls = [call_of(message) for message in replies if message["role"] == "tool"]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def written(tokenizer, messages, ask, **kwargs):
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=ask, **kwargs)


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("rounds", [[USER, USER], [TOOL, TOOL], [BOTH, USER, BOTH]], ids=["users", "tools", "both"])
@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "smollm2"])
def test_tokens_are_those_of_the_whole_template(family, rounds, ended):
    """The model's own tokens are played by what the template writes for its turns."""
    if family == "llama3":  # it writes one call in a turn
        rounds = [TOOL if replies is BOTH else replies for replies in rounds]
    tokenizer = chat_tokenizer(family)
    chat, messages = Chat(tokenizer, TOOLS), [SYSTEM, FIRST]
    ids = chat.prompt_ids(messages)
    for replies in rounds:
        before = written(tokenizer, messages, ask=True)
        messages = [*messages, answer_to(replies)]
        turn = written(tokenizer, messages, ask=False).removeprefix(before).rstrip("\n")
        sampled = encoded(tokenizer, turn)
        assert sampled[-1] in chat.end_ids
        sampled = sampled if ended else sampled[:-1]
        ids += sampled + chat.suffix(replies, sampled)
        messages = [*messages, *replies]
    assert ids == encoded(tokenizer, written(tokenizer, messages, ask=True))


@pytest.mark.parametrize(
    ("family", "kwargs", "words"),
    [
        ("qwen2_5", {}, []),
        ("llama3", {}, []),
        ("qwen3", {}, ["the thinking of earlier turns"]),
        (
            "qwen3",
            {"enable_thinking": False},
            [r"does not repeat '<think>\n\n</think>\n\n' of its generation prompt in earlier turns"],
        ),
        ("smollm2", {}, ["does not list the tools"]),
        ("gemma3", {}, ["has no role for tools", "does not list the tools"]),
        ("mistral", {}, ["the system prompt"]),
    ],
)
def test_what_a_template_does_to_turns_is_said_once_in_words(family, kwargs, words):
    found = check_template(Chat(chat_tokenizer(family), TOOLS, **kwargs), "strict")
    assert len(found) == len(words)
    assert all(word in text.replace("\\\\", "\\") for word, text in zip(words, found, strict=True))
    assert check_template(Chat(chat_tokenizer(family), TOOLS, **kwargs), "disable") == []


def test_thoughts_stay_as_the_model_saw_them_where_the_template_drops_them():
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer, TOOLS)
    thought = encoded(tokenizer, "<think>\nCold, I guess.\n</think>\n\nCold.<|im_end|>")
    ids = chat.prompt_ids([FIRST]) + thought + chat.suffix(USER, thought)
    text = written(tokenizer, [FIRST, {"role": "assistant", "content": "Cold."}, *USER], ask=True)
    assert chat.decode(ids) == text.replace(
        "\nCold.<|im_end|>", "\n<think>\nCold, I guess.\n</think>\n\nCold.<|im_end|>"
    )


def test_without_a_role_for_tools_a_user_tells_what_they_said_all_at_once():
    chat = Chat(chat_tokenizer("gemma3"), TOOLS)
    end_of_turn = chat.encode("<end_of_turn>")
    assert chat.decode(chat.suffix(TOOL + USER, end_of_turn)) == (
        f"\n<start_of_turn>user\n<tool_response>\n{HARD}\n</tool_response>\nAnd now?"
        "<end_of_turn>\n<start_of_turn>model\n"
    )
    assert chat.decode(chat.suffix(BOTH[:1] + TOOL, end_of_turn)) == (
        "\n<start_of_turn>user\n<tool_response>\ncold\n</tool_response>\n"
        f"<tool_response>\n{HARD}\n</tool_response><end_of_turn>\n<start_of_turn>model\n"
    )


def test_mistral_gets_its_ids_of_calls_and_no_space_of_our_making():
    chat = Chat(chat_tokenizer("mistral"), TOOLS)
    ids = chat.suffix(BOTH[:1], chat.encode("</s>"))
    assert chat.decode(ids).startswith('[TOOL_RESULTS]  {"content": cold, "call_id": "call00000"}')
    assert ids[0] == chat.encode("[TOOL_RESULTS]")[0]


def test_white_space_that_tokenises_otherwise_in_the_whole_is_an_error_or_passed_over():
    """GPT-2 cuts the line breaks of Llama's generation prompt in another way when an answer follows them."""
    chat = Chat(chat_tokenizer("llama3", GPT2), TOOLS)
    with pytest.raises(ValueError, match=r"(?s)tokenization_sanity_check_mode = strict: .*=ignore_strippable"):
        check_template(chat, "strict")
    assert check_template(chat, "ignore_strippable") == []


def test_a_template_that_writes_messages_otherwise_at_their_place_is_an_error():
    tokenizer = copy.copy(chat_tokenizer("smollm2"))
    numbered = tokenizer.chat_template.replace("message['content'] +", "(loop.index|string) + message['content'] +")
    for mode in ("strict", "ignore_strippable"):
        with pytest.raises(ValueError, match=rf"tokenization_sanity_check_mode = {mode}: .*\(different text\)"):
            check_template(Chat(tokenizer, TOOLS, chat_template=numbered), mode)


def test_only_the_suffix_is_tokenised():
    class Counting:
        def __init__(self, tokenizer):
            self._tokenizer, self.texts = tokenizer, []

        def __getattr__(self, name):
            return getattr(self._tokenizer, name)

        def __call__(self, text, **kwargs):
            self.texts.append(text)
            return self._tokenizer(text, **kwargs)

    tokenizer = Counting(chat_tokenizer("qwen2_5"))
    chat, end = Chat(tokenizer, TOOLS), chat_tokenizer("qwen2_5").convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.texts == []
    chat.suffix(TOOL, [end])
    (text,) = tokenizer.texts
    assert text == (
        f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{HARD}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_how_the_template_writes_a_call(family):
    call = Chat(chat_tokenizer(family), TOOLS).turns.rendered_call()
    if FAMILIES[family].calls:
        assert "weather" in call
        assert re.search(r"\bof\b.*answer-", call, re.DOTALL)
    else:
        assert call is None


def test_a_model_without_a_template_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"-Instruct.*data.apply_chat_template_kwargs.chat_template"):
        Chat(tokenizer)


async def test_long_replies_are_encoded_with_the_tokenizer_of_their_chat(monkeypatch):
    class Workers:
        def __init__(self, load_tokenizer, seconds):
            self.tokenizer = load_tokenizer()

        async def call(self, function, *arguments):
            return function(self.tokenizer, *arguments)

    monkeypatch.setattr(chat_module, "TextWorkers", Workers)
    settings = ChatSettings.create([], [], {})
    replies = [{"role": "user", "content": "one " * SHORT_TEXT}]
    for family in ("qwen2_5", "llama3"):
        tokenizer = chat_tokenizer(family)
        chat = Chat(tokenizer)
        expected = chat.suffix(replies)
        encoded = await encode_replies(chat, settings, tokenizer, replies, [], len(expected))
        assert encoded == expected
