"""Supervised rows: the loss falls on the answer and its end token, on the tokens generation would see."""

from __future__ import annotations

import json

import pytest

from tests.support.tiny import tiny_tokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.problems import DataError
from verl.utils.dataset.sft_dataset import SFTDataset

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


def test_a_tokenizer_without_template_learns_the_response_as_text(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    item = SFTDataset(write(tmp_path / "a.jsonl", [{"prompt": "Q", "response": "A"}]), tokenizer, {})[0]
    assert tokenizer.decode(item["input_ids"]) == "Q\nA<|end|>"
    assert learned(item) == "A<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_matters(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    chat = [CHAT[1], CHAT[2], {"role": "user", "content": "and 3+1?"}, CHAT[4]]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    assert learned(SFTDataset(file, tokenizer, {})[0]) == "4!"
    with pytest.raises(DataError, match=r"a\.jsonl line 1: the chat template changes what was said before message 3"):
        MultiTurnSFTDataset(file, tokenizer, {})


def test_bad_rows_are_refused_with_their_place(tmp_path):
    with pytest.raises(DataError, match=r"line 1: it has no 'response' \(found: prompt\)\. Set data\.response_key"):
        SFTDataset(write(tmp_path / "a.jsonl", [{"prompt": "x"}]), TOKENIZER, {})
    with pytest.raises(DataError, match=r"line 1: 'response' is a int"):
        SFTDataset(write(tmp_path / "b.jsonl", [{"prompt": "x", "response": 3}]), TOKENIZER, {})
    with pytest.raises(DataError, match="no message of the assistant"):
        SFTDataset(write(tmp_path / "c.jsonl", [{"messages": CHAT[:2]}]), TOKENIZER, {})
    with pytest.raises(DataError, match=r"line 1 .*tokens are more than data\.max_length = 4"):
        SFTDataset(write(tmp_path / "d.jsonl", [{"prompt": "x", "response": "long"}]), TOKENIZER, {"max_length": 4})


def test_longer_rows_are_cut_together_with_their_mask(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "question", "response": "answer"}])
    item = SFTDataset(file, TOKENIZER, {"max_length": 8, "truncation": "left"})[0]
    assert TOKENIZER.decode(item["input_ids"]) == "<|assistant|>answer<|end|>"
    assert item["loss_mask"].tolist() == [0] + [1] * 7
