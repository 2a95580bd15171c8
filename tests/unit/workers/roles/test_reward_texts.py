"""What a reward model with another tokenizer or template reads: its own template over the messages and the answer."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.support.chat_models import chat_tokenizer
from tests.support.tiny import tiny_tokenizer
from verl.protocol import DataProto, object_array
from verl.utils.dataset.conversation import ConversationEncoder, ids_up_to_answer
from verl.utils.dataset.tokens import pad_left
from verl.utils.scoring_tokens import SCORED_AT_END, ScoringEncoder
from verl.workers.roles.reward_model import RewardTexts

POLICY = tiny_tokenizer()
CONVERSATIONS = [
    [{"role": "user", "content": "2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 more, please? " * 4},
    ],
]
ANSWERS = ["4", "It is four.", "7, as 4 + 3 = 7"]
TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


def judge_tokenizer(template: str | None):
    """Other words, other ids, `<s>` before and `</s>` after; without a template it reads pairs, as BERT does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<s>", "</s>", "[SEP]", "<pad>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=letters, show_progress=False)
    raw.train_from_iterator(["And 3 more, please? It is four. Be brief."] * 3, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A [SEP] $B </s>", special_tokens=[("<s>", 1), ("</s>", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def answered(rows=(0, 1, 2), width: int = 400, **columns) -> DataProto:
    """A batch as the rollout gives it; prompts of more than `width` tokens are cut, as the dataset cuts them."""
    made = []
    for row in rows:
        prompt = POLICY.apply_chat_template(CONVERSATIONS[row], add_generation_prompt=True, return_dict=False)
        ids, mask = pad_left(np.array(prompt[-width:]), width, 0)
        answer = POLICY(ANSWERS[row] + "<|end|>", add_special_tokens=False)["input_ids"]
        filler = [0] * (24 - len(answer))
        made.append((ids, mask, torch.tensor(answer + filler), torch.tensor([1] * len(answer) + filler)))
    prompts, masks, responses, present = (torch.stack(column) for column in zip(*made, strict=True))
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": torch.cat([masks, present], 1)}
    tensors["input_ids"] = torch.cat([prompts, responses], 1)
    return DataProto.from_dict(tensors, {"raw_prompt": object_array([CONVERSATIONS[row] for row in rows])} | columns)


def rows_of(encoded: DataProto) -> list[list[int]]:
    mask = encoded.batch["attention_mask"].bool()
    return [ids[row].tolist() for ids, row in zip(encoded.batch["input_ids"], mask, strict=True)]


def expected(tokenizer, row: int) -> list[int]:
    whole = [*CONVERSATIONS[row], {"role": "assistant", "content": ANSWERS[row]}]
    return tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)


@pytest.mark.parametrize("width", [400, 8], ids=["whole", "cut for the policy"])
def test_the_models_own_template_over_messages_and_answer(width):
    """Also where the policy's prompt was cut: the judge has a limit of its own."""
    judge = judge_tokenizer(TURNS)
    encoded = RewardTexts(judge, POLICY, None).encode(answered(width=width))
    assert rows_of(encoded) == [expected(judge, row) for row in range(3)]
    assert encoded.batch["position_ids"][2].tolist() == list(range(encoded.batch["input_ids"].shape[1]))


def test_the_same_words_in_another_template():
    """Only the template differs: the prompt's tokens are no good either."""
    judge = tiny_tokenizer()
    judge.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    assert rows_of(RewardTexts(judge, POLICY, None).encode(answered([2, 1]))) == [
        expected(judge, 2),
        expected(judge, 1),
    ]


def test_without_a_template_it_reads_the_pair_of_contents_and_answer():
    judge = judge_tokenizer(None)
    encoded = rows_of(RewardTexts(judge, POLICY, None).encode(answered([1])))
    assert encoded == [judge("Be brief.\n2+2?", "It is four.")["input_ids"]]


def test_a_long_conversation_loses_its_beginning_and_never_the_answer():
    judge = judge_tokenizer(TURNS)
    long = expected(judge, 2)
    assert len(long) > 20
    assert rows_of(RewardTexts(judge, POLICY, 20).encode(answered([2]))) == [long[-20:]]
    judge.model_max_length = 12
    assert rows_of(RewardTexts(judge, POLICY, None).encode(answered([2]))) == [long[-12:]]
    pair = judge_tokenizer(None)
    (cut,) = rows_of(RewardTexts(pair, POLICY, 20).encode(answered([2])))
    answer = pair(ANSWERS[2], add_special_tokens=False)["input_ids"]
    assert (len(cut), cut[0], cut[-len(answer) - 2 :]) == (20, 1, [3, *answer, 2])


def test_a_batch_without_messages_and_a_template_that_refuses_say_what_to_do():
    batch = answered([1])
    with pytest.raises(ValueError, match=r"reward_model\.path"):
        RewardTexts(judge_tokenizer(NO_SYSTEM), POLICY, None).encode(batch)
    with pytest.raises(ValueError, match=r"(?s)'raw_prompt'.*data\.custom_cls"):
        RewardTexts(judge_tokenizer(TURNS), POLICY, None).encode(batch.select(non_tensor_batch_keys=[]))


def test_a_reward_model_of_ours_without_a_template_reads_what_it_was_trained_on():
    """Not the pair that other classifiers read: the prompt as generation writes it, the answer, its end token."""
    tokenizer = judge_tokenizer(None)
    tokenizer.init_kwargs[SCORED_AT_END] = True
    trained = ConversationEncoder(tokenizer, {}, last_turn_only=True)
    for row in (0, 1):
        whole = [*CONVERSATIONS[row], {"role": "assistant", "content": ANSWERS[row]}]
        (ids,) = ScoringEncoder(tokenizer).encode([whole])
        assert ids == ids_up_to_answer(trained.rows(whole)[0])
        prompt = "\n".join(message["content"] for message in CONVERSATIONS[row])
        assert (
            ids == tokenizer(prompt)["input_ids"] + tokenizer(ANSWERS[row] + "</s>", add_special_tokens=False).input_ids
        )


def test_whatever_a_policy_says_is_scored_though_the_template_would_not_let_it_be_learned():
    """Qwen3's drops what stands between two ends of thinking: that must not end a run."""
    tokenizer = copy.deepcopy(chat_tokenizer("qwen3"))
    tokenizer.init_kwargs[SCORED_AT_END] = True
    question = {"role": "user", "content": "2+2?"}
    answers = ["4", "a</think>b</think>c"]
    encoded = ScoringEncoder(tokenizer).encode([[question, {"role": "assistant", "content": a}] for a in answers])
    assert [tokenizer.decode(ids).rpartition("</think>")[2] for ids in encoded] == [
        "\n\n4<|im_end|>",
        "\n\nc<|im_end|>",
    ]


def test_a_reward_model_of_ours_scores_no_earlier_answer_where_the_user_speaks_last():
    tokenizer = judge_tokenizer(TURNS)
    tokenizer.init_kwargs[SCORED_AT_END] = True
    with pytest.raises(ValueError, match=r"\brole\b.*\buser\b"):
        ScoringEncoder(tokenizer).encode([CONVERSATIONS[2]])


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL_USE = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4", "tool_call_id": "c1"},
    {"role": "tool", "name": "add", "content": "four", "tool_call_id": "c2"},
    {"role": "assistant", "content": "It is four."},
]
AS_TEXT = [
    TOOL_USE[0],
    {
        "role": "assistant",
        "content": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    },
    {
        "role": "user",
        "content": "<tool_response>\n4\n</tool_response>\n<tool_response>\nfour\n</tool_response>",
    },
    TOOL_USE[-1],
]


def test_a_conversation_with_tools_is_written_as_such_by_a_template_that_knows_tools():
    judge = chat_tokenizer("qwen2_5")
    batch = answered([0, 1], agent_messages=object_array([TOOL_USE, None]))
    tools, plain = rows_of(RewardTexts(judge, POLICY, None).encode(batch))
    text = judge.decode(tools)
    assert text.count("<|im_start|>assistant") == 2
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>' in text
    assert "<tool_response>\n4\n</tool_response>" in text
    whole = [*CONVERSATIONS[1], {"role": "assistant", "content": ANSWERS[1]}]
    assert plain == judge.apply_chat_template(whole, tokenize=True, return_dict=False), "a row that no agent made"


@pytest.mark.parametrize(
    "template",
    [
        TURNS,
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
        + TURNS,
    ],
    ids=["leaves calls out", "refuses tools"],
)
def test_a_conversation_with_tools_is_text_for_a_template_that_knows_none(template):
    judge = judge_tokenizer(template)
    batch = answered([0], agent_messages=object_array([TOOL_USE]))
    (ids,) = rows_of(RewardTexts(judge, POLICY, None).encode(batch))
    assert ids == judge.apply_chat_template(AS_TEXT, tokenize=True, return_dict=False)


def test_a_rewritten_context_is_read_instead_of_the_prompt():
    judge = judge_tokenizer(TURNS)
    own = [{"role": "user", "content": "In short: 2+2."}, {"role": "assistant", "content": "4"}]
    batch = answered([0], agent_messages=object_array([own]))
    (ids,) = rows_of(RewardTexts(judge, POLICY, None).encode(batch))
    assert ids == judge.apply_chat_template(own, tokenize=True, return_dict=False)
