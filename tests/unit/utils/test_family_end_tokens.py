"""SFT loss masks and the position that a reward model scores, for the templates of every model family."""

from __future__ import annotations

import pytest

from tests.support.chat_models import FAMILIES, chat_tokenizer
from tests.support.family_turns import TOOL, TOOLS, USER, Case, Conversation, template_kwargs
from verl.trainer.supervised.rm import padding_token
from verl.utils.dataset.conversation import ConversationEncoder, ids_up_to_answer
from verl.utils.end_tokens import find_end_tokens
from verl.utils.scoring_tokens import SCORED_AT_END, ScoringEncoder

CASES = [
    Case(name, tools, "on" if family.thinking else None, None)
    for name, family in FAMILIES.items()
    for tools in ([False, True] if family.calls else [False])
    if name != "deepseek_r1"  # its generation prompt opens a thought that its answers do not have
]


def learned_end(case, called):
    """What the template, or the next message, ends the last answer with."""
    kind = FAMILIES[case.family]
    if kind.separator:
        return kind.separator
    if kind.end is None:
        return "<|observation|>" if called else "<|user|>"
    if kind.end in kind.stops:
        return kind.end
    return kind.call_end if called else kind.eos


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_falls_on_the_answer_and_the_token_that_ends_it(case):
    conversation = Conversation(case)
    turn, _, message = conversation.model_turn(0, TOOL if case.tools else USER)
    if case.tools:  # some templates write no text beside calls, which the encoder refuses to drop
        message["content"] = ""
        turn = conversation.turn(message, 0)
    encoder = ConversationEncoder(conversation.tokenizer, template_kwargs(case.family, case.thinking), True)
    (row,) = encoder.rows([*conversation.messages, message], TOOLS if case.tools else None)
    learned = [token for token, weight in zip(row.ids, row.weights, strict=True) if weight]
    end = learned_end(case, "tool_calls" in message)
    before, whole = conversation.encode(conversation.text), conversation.encode(conversation.text + turn + end)
    # Alone, as in generation, where white space of the prompt and of the answer would be one token together.
    assert learned in (whole[len(before) :], conversation.encode(turn + end))
    assert encoder.learns_end_token(row) == bool(end.strip())
    assert ids_up_to_answer(row)[-1] == whole[-1]


@pytest.mark.parametrize("case", [case for case in CASES if not case.tools], ids=str)
def test_a_reward_model_scores_at_the_end_token_and_is_padded_with_another(case):
    conversation, tokenizer = Conversation(case), chat_tokenizer(case.family)
    turn, _, message = conversation.model_turn(0, USER)
    tokenizer.init_kwargs[SCORED_AT_END] = True
    try:
        (ids,) = ScoringEncoder(tokenizer).encode([[*conversation.messages, message]])
    finally:
        del tokenizer.init_kwargs[SCORED_AT_END]
    assert ids == conversation.encode(conversation.text + turn + learned_end(case, called=False))
    padding = tokenizer.convert_tokens_to_ids(padding_token(tokenizer, len(tokenizer)))
    only_ends = set(tokenizer.added_tokens_decoder) <= find_end_tokens(None, None, tokenizer).ids
    assert padding != ids[-1] or only_ends


def test_earlier_turns_of_a_family_without_end_tokens_learn_the_role_token_that_follows_them():
    case = Case("glm4_5", True, "on", None)
    conversation = Conversation(case)
    _, _, call = conversation.model_turn(0, TOOL)
    _, _, answer = conversation.model_turn(1, USER)
    encoder = ConversationEncoder(conversation.tokenizer, template_kwargs("glm4_5", "on"), False)
    (row,) = encoder.rows([*conversation.messages, call, *TOOL, answer], TOOLS)
    learned = encoder.describe(row).split("⟦")[1:]
    assert [part.partition("⟧")[0].rpartition("<|")[2] for part in learned] == ["observation|>", "user|>"]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("roles", "learned"),
    [
        (["user", "assistant", "assistant", "user"], ["A1", "A2<|user|>"]),
        (["user", "assistant", "assistant"], ["A1", "A2<|user|>"]),
        (["user", "assistant", "system", "user", "assistant"], ["A1", "A4<|user|>"]),
        (
            ["user", "assistant", "user", "assistant", "tool", "assistant"],
            ["A1<|user|>", "A3<|observation|>", "A5<|user|>"],
        ),
    ],
    ids=str,
)
def test_the_role_token_is_learned_only_where_the_conversation_continues_with_it(roles, learned, split):
    tokenizer = chat_tokenizer("glm4")
    encoder = ConversationEncoder(tokenizer, {}, False, split=split)
    messages = [
        {"role": role, "content": f"{role[0].upper()}{number}"} | ({"name": "f"} if role == "tool" else {})
        for number, role in enumerate(roles)
    ]
    (row,) = encoder.rows(messages)
    assert [part.partition("⟧")[0] for part in encoder.describe(row).split("⟦")[1:]] == learned
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.decode(row.ids)
    assert rendered.startswith(text.removesuffix("<|user|>"))


def test_no_role_token_follows_an_end_token_that_the_template_writes_after_the_last_answer():
    template = (
        "{% for m in messages %}<|{{m.role}}|>\n{{m.content}}{% if loop.last and m.role=='assistant' %}<|endoftext|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    encoder = ConversationEncoder(chat_tokenizer("glm4"), {"chat_template": template}, True)
    (row,) = encoder.rows([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}])
    assert encoder.describe(row) == "<|user|>\nQ<|assistant|>\n⟦A<|endoftext|>⟧"
