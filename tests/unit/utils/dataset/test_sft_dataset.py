"""Supervised rows: the loss falls on the answer and its end token, on the tokens generation would see."""

from __future__ import annotations

import copy
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import processors

from tests.support.chat_models import chat_tokenizer
from tests.support.tiny import tiny_tokenizer
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.dataset.problems import DataError
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, SFTDataset

TOKENIZER = tiny_tokenizer()
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4!"},
]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def learned(item):
    return TOKENIZER.decode(item["input_ids"][item["loss_mask"].bool()])


@pytest.mark.parametrize("prompt", ["1+1?", [{"role": "user", "content": "1+1?"}]])
def test_the_loss_falls_on_the_response_and_its_end(tmp_path, prompt):
    data = SFTDataset(write(tmp_path / "a.jsonl", [{"prompt": prompt, "response": "it is 2"}]), TOKENIZER, {})
    item = data[0]
    assert TOKENIZER.decode(item["input_ids"]) == "<|user|>1+1?<|end|><|assistant|>it is 2<|end|>"
    assert learned(item) == "it is 2<|end|>"
    assert item["position_ids"].tolist() == list(range(len(item["input_ids"])))


def test_columns_inside_structs_are_named_with_dots(tmp_path):
    rows = [{"extra_info": {"question": "1+1?", "answer": "2"}}]
    config = {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"}
    assert learned(SFTDataset(write(tmp_path / "a.jsonl", rows), TOKENIZER, config)[0]) == "2<|end|>"


def test_of_a_conversation_the_last_answer_is_learned_or_all_of_them(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    assert learned(SFTDataset(file, TOKENIZER, {})[0]) == "4!<|end|>"
    assert learned(MultiTurnSFTDataset(file, TOKENIZER, {})[0]) == "2<|end|>4!<|end|>"


def test_what_a_template_writes_after_the_end_token_is_not_learned(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>\\n").replace("\\n", "\n")
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    item = MultiTurnSFTDataset(file, tokenizer, {})[0]
    assert tokenizer.decode(item["input_ids"]).endswith("4!<|end|>\n")
    assert learned(item) == "2<|end|>4!<|end|>"


def plain_tokenizer():
    """As base models have it: no template, and a token that begins every text (`<|system|>` here)."""
    tokenizer = templated(None)
    tokenizer.add_special_tokens({"bos_token": "<|system|>"})
    begin = processors.TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", 2)])
    tokenizer.backend_tokenizer.post_processor = begin
    return tokenizer


def test_without_a_template_an_answer_follows_the_very_tokens_that_generation_begins_with(tmp_path):
    """Once each: with the token that begins a text, and without a line break that no prompt has."""
    tokenizer = plain_tokenizer()
    data = MultiTurnSFTDataset(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer, {})
    prompts = PromptEncoder(tokenizer, {}).encode([CHAT[:2], CHAT[:4]])
    assert [learned(data[row]) for row in (0, 1)] == ["2<|end|>", "4!<|end|>"]
    for row, prompt in enumerate(prompts):
        assert data[row]["input_ids"][: len(prompt)].tolist() == prompt
        assert data[row]["loss_mask"].nonzero()[0] == len(prompt)
    item = SFTDataset(write(tmp_path / "b.jsonl", [{"prompt": "Q", "response": "A"}]), tokenizer, {})[0]
    assert tokenizer.decode(item["input_ids"]) == "<|system|>QA<|end|>"


@pytest.mark.parametrize(
    "changes",
    [{"tools": [{"name": "run"}]}, {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"name": "run"}]}]}],
)
def test_without_a_template_nothing_can_be_called(tmp_path, changes):
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT} | changes])
    with pytest.raises(
        DataError, match=r"line 1: .*(render tools\.|'tool_calls').*apply_chat_template_kwargs\.chat_template"
    ):
        SFTDataset(file, plain_tokenizer(), {})


# As models that think write their turns: an answer keeps its thinking until the user speaks again.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "<|{{ m.role }}|>{{ said }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THOUGHT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>easy</think>2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>hm</think>?"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "<think>ah</think>4"},
]


def templated(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_drops_earlier_thinking_makes_a_row_of_each_text_that_the_model_will_see(tmp_path, caplog):
    file = write(tmp_path / "a.jsonl", [{"messages": THOUGHT}, {"messages": THOUGHT[:2]}])
    tokenizer = templated(THINKING)
    with caplog.at_level("INFO", logger="verl"):
        data = MultiTurnSFTDataset(file, tokenizer, {})
    assert [learned(data[row]) for row in range(len(data))] == [
        "<think>easy</think>2<|end|>",
        "<think>hm</think>?<|end|><think>ah</think>4<|end|>",
        "<think>easy</think>2<|end|>",
    ]
    assert tokenizer.decode(data[1]["input_ids"]).startswith("<|user|>1+1?<|end|>\n<|assistant|>2<|end|>\n<|user|>2+2?")
    assert "2 conversations become 3 rows" in caplog.text
    assert "⟦<think>hm</think>?<|end|>⟧\n<|tool|>4<|end|>\n<|assistant|>⟦<think>ah</think>4<|end|>⟧\n" in caplog.text
    with pytest.raises(DataError, match=r"(?s)line 1.*message 3.*rewritten_turns"):
        MultiTurnSFTDataset(file, tokenizer, {"rewritten_turns": "error"})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            THINKING.replace("loop.index0 < ns.last", "true"),
            "part of message 1: '<think>easy</think>2",
        ),
        (
            THINKING.replace("<|assistant|>", "<|assistant|><think>"),
            r"'<\|assistant\|><think>', .*message 1 .*'<\|assistant\|>2",
        ),
        (
            "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "text before message 1",
        ),
        ("{{ raise_exception('roles must alternate') }}", "2 messages .*roles must alternate"),
        (THINKING.replace("{{ said }}", "{% generation %}{% endgeneration %}{{ said }}"), "nothing of message 1"),
    ],
)
def test_a_template_under_which_the_answer_cannot_be_learned_is_refused(tmp_path, template, said):
    messages = [THOUGHT[0], {"role": "assistant", "content": "<think>easy</think>2"}]
    if "<|assistant|><think>" in template:
        messages[1]["content"] = "2"
    with pytest.raises(DataError, match=f"line 1: .*template .*{said}"):
        SFTDataset(write(tmp_path / "a.jsonl", [{"messages": messages}]), templated(template), {})


def test_thinking_that_the_generation_prompt_begins_is_learned_from_there(tmp_path):
    tokenizer = templated(
        THINKING.replace(
            "{% if add_generation_prompt %}<|assistant|>", "{% if add_generation_prompt %}<|assistant|><think>"
        )
    )
    data = SFTDataset(write(tmp_path / "a.jsonl", [{"messages": THOUGHT[:2]}]), tokenizer, {})
    assert learned(data[0]) == "easy</think>2<|end|>"


def test_what_the_template_itself_marks_is_learned(tmp_path):
    """With tags of our own choosing: neither the signature before the end token nor other roles."""
    template = (
        "{%- for m in messages -%}\n<|{{ m.role }}|>{%- if m.role == 'assistant' %}\n"
        "{%- generation -%} {{ m.content }} {% endgeneration %}!!<|end|>{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = templated(template)
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    item = MultiTurnSFTDataset(file, tokenizer, {})[0]
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert item["input_ids"].tolist() == whole["input_ids"]
    assert item["loss_mask"].tolist() == whole["assistant_masks"]
    assert learned(SFTDataset(file, tokenizer, {})[0]).strip() == "4!"
    tokenizer.chat_template = "{{ messages | length }}" + template  # its beginning changes with every message
    assert learned(SFTDataset(file, tokenizer, {})[0]).strip() == "4!"


def test_a_generation_prompt_that_the_template_marks_too_is_not_learned(tmp_path):
    """SmolLM3's blocks begin with the header of the turn, which every prompt ends with."""
    tokenizer = templated(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>{{ m.content }}<|end|>\n"
        "{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    item = MultiTurnSFTDataset(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer, {})[0]
    assert learned(item) == "2<|end|>4!<|end|>"


def test_what_closes_a_conversation_is_no_part_of_its_last_answer(tmp_path):
    """Phi-3's template ends a text with a token that no answer ends with: turns are one row all the same."""
    tokenizer = templated(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else '<|pad|>' }}"
    )
    data = MultiTurnSFTDataset(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer, {})
    assert [learned(item) for item in data] == ["2<|end|>4!<|end|>"]
    assert tokenizer.decode(data[0]["input_ids"]).endswith("4!<|end|>")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>\n", "<|end|><|pad|>")  # two ends, always
    file = write(tmp_path / "b.jsonl", [{"messages": CHAT[:3]}])
    assert learned(SFTDataset(file, tokenizer, {})[0]).startswith("2<|end|><|pad|>")


TOOLS = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_are_written_by_the_template_and_calls_are_learned(tmp_path, as_text):
    """Also from a columnar file, which fills what a row lacks with null, and with arguments as text."""
    arguments = {"code": "print(2)"}
    calls = [{"function": {"name": "run", "arguments": json.dumps(arguments) if as_text else arguments}}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "tool_calls": calls},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "2!"},
            ],
            "tools": json.dumps([{"name": "run"}]) if as_text else [{"name": "run"}, {"type": "other"}],
        },
    ]
    file = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    tokenizer = templated(TOOLS)
    item = MultiTurnSFTDataset(file, tokenizer, {})[0]
    assert learned(item) == '<call>run({"code": "print(2)"})</call><|end|>2!<|end|>'
    told = '{"name": "run"}' if as_text else '{"name": "run"}{"type": "other"}'
    assert tokenizer.decode(item["input_ids"]).startswith(f"<|system|>{told}<|end|><|user|>go")


def test_schemas_and_calls_may_each_be_json_text(tmp_path):
    calls = json.dumps([{"function": {"name": "run", "arguments": "{}"}}])
    row = {"messages": [CHAT[1], {"role": "assistant", "tool_calls": calls}], "tools": [json.dumps({"name": "run"})]}
    item = SFTDataset(write(tmp_path / "a.jsonl", [row]), templated(TOOLS), {})[0]
    assert learned(item) == "<call>run({})</call><|end|>"
    assert TOKENIZER.decode(item["input_ids"]).startswith('<|system|>{"name": "run"}<|end|>')


def test_arguments_are_json_text_for_a_template_that_takes_nothing_else(tmp_path):
    """As DeepSeek's, which adds them to other texts."""
    tokenizer = templated(TOOLS.replace("c.function.arguments | tojson", "'' + c.function.arguments"))
    calls = [{"function": {"name": "run", "arguments": {"code": "é"}}}]
    chat = [CHAT[1], {"role": "assistant", "tool_calls": calls}]
    item = SFTDataset(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer, {})[0]
    assert learned(item) == '<call>run({"code": "é"})</call><|end|>'


CALL = {"function": {"name": "run", "arguments": "{broken"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": "{broken"}, "'tools': .*JSON"),
        ({"tools": {"name": "run"}}, r"'tools' .*\bdict\b.*list"),
        ({"tools": ["{broken"]}, "schema 0 of 'tools': .*JSON"),
        ({"tools": [7]}, r"schema 0 of 'tools' .*\bint\b"),
        ({"tools": [{"name": "search"}]}, ".*template .*'search'"),
        ({"enable_thinking": "false"}, r"'enable_thinking' .*'false'\..*\btrue\b"),
        ({"messages": "hello"}, "'messages' .*string.*list"),
        (
            {"messages": [CHAT[1], {"role": "gpt", "content": "2"}]},
            r".*\(roles: user, gpt\)",
        ),
        ({"messages": CHAT[2:3]}, "message 0 .*prompt.*'loss'"),
        (
            {"messages": [CHAT[1], {"role": "assistant", "tool_calls": [CALL]}]},
            ".*'arguments' in 'tool_calls' of message 1: .*JSON",
        ),
        (
            {"messages": [CHAT[1], {"role": "assistant", "tool_calls": [{"id": 1}]}]},
            r"'tool_calls' of message 1 .*\{function: \{name, arguments\}\}",
        ),
    ],
)
def test_what_templates_cannot_write_is_named_with_its_place(tmp_path, changes, said):
    """A template that writes no tools would have the model call what it was never told of."""
    with pytest.raises(DataError, match=f"line 1: {said}"):
        SFTDataset(write(tmp_path / "a.jsonl", [{"messages": CHAT[1:3]} | changes]), TOKENIZER, {})


def test_a_message_counts_by_its_own_loss(tmp_path):
    chat = [*CHAT[:2], {**CHAT[2], "loss": 0.5}, CHAT[3], CHAT[4], CHAT[1], {**CHAT[2], "loss": 0}]
    item = MultiTurnSFTDataset(write(tmp_path / "a.jsonl", [{"messages": chat}]), TOKENIZER, {})[0]
    assert item["loss_mask"][item["loss_mask"] > 0].tolist() == [0.5] * 2 + [1.0] * 3
    chat[2]["loss"] = 1
    item = MultiTurnSFTDataset(write(tmp_path / "b.jsonl", [{"messages": chat}]), TOKENIZER, {})[0]
    assert (learned(item), item["loss_mask"].dtype) == ("2<|end|>4!<|end|>", torch.int64)
    assert learned(SFTDataset(write(tmp_path / "b.jsonl", [{"messages": chat}]), TOKENIZER, {})[0]) == "2<|end|>"
    for changed, said in (({"loss": -1}, r"-1\."), ({"loss": "x"}, r"'x'\.")):
        with pytest.raises(DataError, match=f"'loss' of message 2 .*{said}"):
            MultiTurnSFTDataset(
                write(tmp_path / "c.jsonl", [{"messages": [*chat[:2], {**CHAT[2], **changed}]}]), TOKENIZER, {}
            )
    with pytest.raises(DataError, match=r"'loss' of message 1 .*\b1\b.*\buser\b"):
        MultiTurnSFTDataset(
            write(tmp_path / "d.jsonl", [{"messages": [chat[0], {**chat[1], "loss": 1}, chat[2]]}]), TOKENIZER, {}
        )


def test_thinking_is_switched_by_a_column_of_the_row(tmp_path):
    tokenizer = templated("{% if enable_thinking %}<|system|>{% endif %}" + TOOLS)
    rows = [{"messages": CHAT[1:3], "extra": {"thinks": on}} for on in (True, False)]
    data = SFTDataset(write(tmp_path / "a.jsonl", rows), tokenizer, {"enable_thinking_key": "extra.thinks"})
    assert [tokenizer.decode(data[row]["input_ids"]).startswith("<|system|>") for row in (0, 1)] == [True, False]


def test_an_answer_without_an_end_is_worth_a_warning(tmp_path, caplog):
    file = write(tmp_path / "a.jsonl", [{"prompt": "Q", "response": "A"}])
    SFTDataset(file, TOKENIZER, {})
    assert "end token" not in caplog.text
    SFTDataset(file, templated(TOOLS.replace("<|end|>", " ")), {})
    assert "has no end token" in caplog.text


def test_bad_rows_are_refused_with_their_place(tmp_path):
    with pytest.raises(DataError, match=r"(?s)line 1.*'response'.*data\.response_key"):
        SFTDataset(write(tmp_path / "a.jsonl", [{"prompt": "x"}]), TOKENIZER, {})
    with pytest.raises(DataError, match=r"line 1: 'response' .*\bint\b"):
        SFTDataset(write(tmp_path / "b.jsonl", [{"prompt": "x", "response": 3}]), TOKENIZER, {})
    with pytest.raises(DataError, match=r"line 1: .*\(roles: system, user\)"):
        SFTDataset(write(tmp_path / "c.jsonl", [{"messages": CHAT[:2]}]), TOKENIZER, {})
    with pytest.raises(DataError, match=r"line 1 .*\b9 tokens .*data\.max_length = 4\b"):
        SFTDataset(write(tmp_path / "d.jsonl", [{"prompt": "x", "response": "long"}]), TOKENIZER, {"max_length": 4})


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_a_row_that_the_template_refuses_is_named_before_anything_is_learned(tmp_path, truncation):
    rows = [{"prompt": "Q", "response": "A"}, {"prompt": [{"role": "nobody", "content": "Q"}], "response": "A"}]
    tokenizer = templated("{% if messages[0].role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}" + TOOLS)
    with pytest.raises(DataError, match=r"line 2: .*\b2 messages \(TemplateError: who\?; roles: nobody, assistant\)"):
        SFTDataset(write(tmp_path / "a.jsonl", rows), tokenizer, {"truncation": truncation})


def test_longer_rows_are_cut_together_with_their_mask(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "question", "response": "answer"}])
    item = SFTDataset(file, TOKENIZER, {"max_length": 8, "truncation": "left"})[0]
    assert TOKENIZER.decode(item["input_ids"]) == "<|assistant|>answer<|end|>"
    assert item["loss_mask"].tolist() == [0] + [1] * 7


@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_rows_whose_answer_would_be_cut_off_whole_are_left_out_and_told(tmp_path, caplog, form):
    asked = ["q" * 30, "q"]
    rows = [{"prompt": text, "response": "yes"} for text in asked]
    if form == "messages":
        rows = [{"messages": [{"role": "user", "content": text}, CHAT[2]]} for text in asked]
    settings = {"max_length": 8, "truncation": "right"}
    data = SFTDataset(write(tmp_path / "a.jsonl", rows), TOKENIZER, settings)
    assert len(data) == 1
    assert data[0]["loss_mask"].any()
    assert "line 1 (and 0 more of 2): data.truncation=right cuts off the whole answer" in caplog.text
    with pytest.raises(DataError, match=r"data\.truncation=right .*data\.max_length = 8\b"):
        SFTDataset(write(tmp_path / "b.jsonl", rows[:1]), TOKENIZER, settings)


@pytest.mark.parametrize("option", ["messages_key", "tools_key", "enable_thinking_key"])
def test_a_column_that_was_named_must_be_there(tmp_path, option):
    file = write(tmp_path / "a.jsonl", [{"prompt": "Q", "response": "A"}])
    with pytest.raises(DataError, match=rf"data\.{option} = typo: .* prompt, response\."):
        SFTDataset(file, TOKENIZER, {option: "typo"})
    assert len(SFTDataset(file, TOKENIZER, {option: "typo"}, split="validation")) == 1


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_between_prompt_and_answer(tmp_path):
    """As Llama 2's, whose template has no special token before an answer."""
    tokenizer = copy.deepcopy(chat_tokenizer("mistral"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}"
        "(asked) {{ m.content }} (end){% endif %}{% endfor %}"
    )
    item = MultiTurnSFTDataset(write(tmp_path / "a.jsonl", [{"messages": CHAT[1:]}]), tokenizer, {})[0]
    whole = tokenizer.apply_chat_template(CHAT[1:], tokenize=False)
    assert item["input_ids"].tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(item["input_ids"][item["loss_mask"].bool()]) == " 2</s> 4!</s>"
