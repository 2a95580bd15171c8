"""Compared answers from files: every form of a row, one item per prompt, one row per answer."""

import json

import pytest

from tests.support.tiny import tiny_tokenizer
from verl.config import RMConfig, load_config
from verl.trainer.supervised.preference_dataset import PreferenceDataset
from verl.trainer.supervised.rm import batch_pairs, collate_comparisons, padding_token
from verl.utils.dataset.problems import DataError

USER = {"role": "user", "content": "hi"}


def said(text):
    return {"role": "assistant", "content": text}


def dataset(folder, rows, *overrides, limit=-1):
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["data.train_files=x", "model.path=x", "data.max_length=64", *overrides]
    data = load_config(None, given, check_files=False, root=RMConfig).data
    return PreferenceDataset(str(folder / "pairs.jsonl"), tiny_tokenizer(), data, limit)


def texts(item):
    return [tiny_tokenizer().decode(ids) for ids in item["answers"]]


@pytest.mark.parametrize("truncation", ["error", "left"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [said("yes")], "rejected": "no"},
        {"prompt": "something else", "chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
        {"chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
    ],
)
def test_every_form_of_a_row_is_the_same_two_conversations(tmp_path, row, truncation):
    (item,) = [dataset(tmp_path, [row], f"data.truncation={truncation}")[0]]
    assert texts(item) == ["<|user|>hi<|end|><|assistant|>yes<|end|>", "<|user|>hi<|end|><|assistant|>no<|end|>"]
    assert item["answer_tokens"] == [4, 3]
    assert item["pairs"].tolist() == [[0, 1, 1, 0, 1]]


def test_pairs_of_one_prompt_are_one_item_and_each_answer_is_there_once(tmp_path):
    ranked = ["best", "good", "poor"]
    rows = [{"prompt": "hi", "chosen": a, "rejected": b} for i, a in enumerate(ranked) for b in ranked[i + 1 :]]
    rows.insert(1, {"prompt": "bye", "chosen": "a", "rejected": "b", "margin": 2, "weight": 0.5, "tie": True})
    rows.append({"prompt": "bye", "chosen": "b", "rejected": "c", "preference": 0.7})
    items = dataset(tmp_path, rows)
    assert len(items) == 2
    assert [text.split("<|assistant|>")[1] for text in texts(items[0])] == ["best<|end|>", "good<|end|>", "poor<|end|>"]
    assert items[0]["pairs"][:, :2].tolist() == [[0, 1], [0, 2], [1, 2]]
    assert items[1]["pairs"].tolist() == [[0, 1, 0.5, 2, 0.5], [1, 2, 0.7, 0, 1]]
    batch = collate_comparisons([items[0], items[1]], pad_token_id=0)
    assert batch["input_ids"].shape[0] == 6
    pairs = batch_pairs(batch)
    assert list(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 2),
        (3, 4),
        (4, 5),
    ]
    assert pairs.margin.tolist() == [0, 0, 0, 2, 0]
    assert pairs.preference.tolist() == [1, 1, 1, 0.5, 0.7]


def test_an_empty_answer_is_one_to_learn_from(tmp_path):
    item = dataset(tmp_path, [{"prompt": "hi", "chosen": "yes", "rejected": ""}])[0]
    assert texts(item)[1] == "<|user|>hi<|end|><|assistant|><|end|>"


def test_a_conversation_is_scored_at_its_end_whatever_its_messages_weigh_in_fine_tuning(tmp_path):
    begin = [USER, {**said("yes"), "loss": 1}, USER]
    row = {"chosen": [*begin, {**said("good"), "loss": 0}], "rejected": [*begin, said("bad")]}
    item = dataset(tmp_path, [row])[0]
    assert [text.split("<|assistant|>")[-1] for text in texts(item)] == ["good<|end|>", "bad<|end|>"]
    assert item["answer_tokens"] == [5, 4]


def test_only_the_first_pairs_are_used_where_that_is_asked(tmp_path):
    rows = [{"prompt": "hi", "chosen": str(i), "rejected": "x"} for i in range(4)]
    assert len(dataset(tmp_path, rows, limit=3)[0]["pairs"]) == 3


def test_a_long_answer_is_refused_or_keeps_its_end(tmp_path):
    rows = [{"prompt": "hi", "chosen": "yes", "rejected": "no" * 50}]
    with pytest.raises(DataError, match=r"(?s)line 1.*data\.max_length"):
        dataset(tmp_path, rows)
    item = dataset(tmp_path, rows, "data.truncation=left")[0]
    assert texts(item)[1] == ("no" * 50)[-63:] + "<|end|>"
    assert item["answer_tokens"] == [4, 64]


@pytest.mark.parametrize(("truncation", "kept"), [("left", [4, 9]), ("right", [4, 5]), ("middle", [4, 5])])
def test_the_length_of_an_answer_is_what_truncation_leaves_of_it(tmp_path, truncation, kept):
    rows = [{"prompt": "p", "chosen": "yes", "rejected": "no, not at all"}]
    item = dataset(tmp_path, rows, "data.max_length=9", f"data.truncation={truncation}")[0]
    assert item["answer_tokens"] == kept


@pytest.mark.parametrize(("chosen", "rows_named"), [("abb", "line 2 (and 1 more): "), ("ab", "line 2: ")])
def test_pairs_of_an_answer_with_itself_are_reported(tmp_path, caplog, chosen, rows_named):
    dataset(tmp_path, [{"prompt": "p", "chosen": answer, "rejected": "b"} for answer in chosen])
    assert f"{rows_named}both answers are equal" in caplog.text


@pytest.mark.parametrize(
    ("row", "said_of_it"),
    [
        ({"chosen": "a", "rejected": "b"}, "'prompt'"),
        ({"prompt": "p", "chosen": "a"}, r"'rejected'\."),
        ({"prompt": "p", "chosen": "a", "rejected": []}, "'rejected' .*messages"),
        ({"prompt": "p", "chosen": [said("a"), USER], "rejected": "b"}, "'chosen' .*user"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "preference": 1.5}, "'preference' .*1.5"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "weight": -1}, "'weight' .*-1"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, "'margin' .*'big'"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "tie": "false"}, "'tie' .*'false'"),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "tie": True, "preference": 0.9},
            "'tie' .*'preference' is 0.9",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_remedy(tmp_path, row, said_of_it):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match=rf"line 2: .*{said_of_it}"):
        dataset(tmp_path, [good, row])


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_a_row_that_the_template_refuses_is_named_before_anything_is_learned(tmp_path, truncation):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2
    rows[1] = rows[1] | {"prompt": [{"role": "user", "content": "p", "tool_calls": "{broken"}]}
    with pytest.raises(DataError, match=r"(?s)line 2.*'tool_calls'.*message 0"):
        dataset(tmp_path, rows, f"data.truncation={truncation}")


def test_a_column_that_was_named_must_be_there(tmp_path):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b", "gap": 2}]
    assert dataset(tmp_path, rows, "data.margin_key=gap")[0]["pairs"][0, 3] == 2
    with pytest.raises(DataError, match=r"data\.margin_key"):
        dataset(tmp_path, rows, "data.margin_key=gpa")


def test_padding_is_a_token_that_ends_no_answer():
    tokenizer = tiny_tokenizer()
    assert padding_token(tokenizer, 264) == "<|pad|>"
    tokenizer.pad_token = "<|end|>"
    assert padding_token(tokenizer, 264) == "<|pad|>"


def test_padding_is_a_token_of_the_model(caplog):
    """A tokenizer may have got one that its model was never resized for."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 261
    assert padding_token(tokenizer, 264) == "[PAD]"
    assert padding_token(tokenizer, 261) == "<|pad|>"
    tokenizer.eos_token = "<|pad|>"
    assert padding_token(tokenizer, 1) == "<|pad|>"
    assert "transformers reads scores one token too early" in caplog.text
    tokenizer.eos_token = "[PAD]"
    with pytest.raises(ValueError, match="vocab_size"):
        padding_token(tokenizer, 0)


def test_padding_is_rather_a_token_that_the_template_does_not_write():
    """Nothing is learned of the padding's embedding."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.bos_token = "<|assistant|>", "<|pad|>"
    assert padding_token(tokenizer, 264) == "<|system|>"
