"""derive_messages: prompts and replies that the template rendered become messages, other tokens text."""

from __future__ import annotations

from tests.support.chat_models import chat_tokenizer
from verl.agent.outputs import derive_messages
from verl.types.trajectory import Row, Turn

TOKENIZER = chat_tokenizer("qwen2_5")
ASK, NEXT = {"role": "user", "content": "How warm?"}, {"role": "user", "content": "And in Rome?"}


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PROMPT, REPLY, INLINE = (
    encode("<|im_start|>user\nHow warm?"),
    encode("<|im_start|>user\nAnd in Rome?"),
    encode(" [42] "),
)


def row(*turns: Turn, prompt: list[int] = PROMPT) -> Row:
    return Row(prompt, list(turns))


def model(text: str) -> Turn:
    return Turn("model", encode(text))


def test_rendered_replies_are_messages_and_others_part_of_the_response():
    prompts, rendered = {tuple(PROMPT): [ASK]}, {tuple(REPLY): [NEXT]}
    conversation = row(
        model("Warm."), Turn("environment", REPLY), model("Hot"), Turn("environment", INLINE), model("!")
    )
    assert derive_messages(conversation, prompts, rendered, TOKENIZER) == [
        ASK,
        answer("Warm."),
        NEXT,
        answer("Hot [42] !"),
    ]
    unanswered = row(model("Warm."), Turn("environment", REPLY))
    assert derive_messages(unanswered, prompts, rendered, TOKENIZER) == [ASK, answer("Warm.")]
    assert derive_messages(row(), prompts, rendered, TOKENIZER) == [ASK, answer("")]


def test_an_unknown_prompt_is_one_user_message():
    other = row(model("Warm."), prompt=encode("In short: warm?"))
    assert derive_messages(other, {}, {}, TOKENIZER) == [
        {"role": "user", "content": "In short: warm?"},
        answer("Warm."),
    ]
