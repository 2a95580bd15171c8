"""RLHFDataset: prompts as the model will see them, every field the reward needs, and clear errors for bad files."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.support.tiny import tiny_tokenizer
from verl import DataProto
from verl.utils.dataset.problems import DataError
from verl.utils.dataset.rl_dataset import RLDataset, RLHFDataset, collate_fn
from verl.utils.dataset.tokens import truncate

TOKENIZER = tiny_tokenizer()


def row(number: int = 0, **changes):
    made = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
    }
    return {**made, **changes}


def said(text):
    return [{"role": "user", "content": text}]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(item) for item in rows) + "\n")
    else:
        path.write_text(json.dumps(rows, indent=1))
    return str(path)


def dataset(files, **config):
    return RLHFDataset(files, TOKENIZER, {"max_prompt_length": 64, **config})


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_a_row_is_the_templated_prompt_left_padded_with_all_its_fields(tmp_path, suffix):
    data = dataset(write(tmp_path / f"train.{suffix}", [row(i) for i in range(5)]))
    item = data[3]
    text = "<|user|>What is 3 + 1?<|end|><|assistant|>"
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert item["input_ids"].tolist() == [0] * (64 - len(ids)) + ids
    assert item["attention_mask"].tolist() == [0] * (64 - len(ids)) + [1] * len(ids)
    assert item["position_ids"][-len(ids) :].tolist() == list(range(len(ids)))
    assert item["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert (item["data_source"], item["ability"], item["index"]) == ("openai/gsm8k", "math", 3)
    assert item["extra_info"] == {"index": 3, "split": "train"}
    assert "prompt" not in item
    assert "raw_prompt" not in item
    assert RLDataset is RLHFDataset


def test_the_messages_are_kept_when_asked_for(tmp_path):
    data = dataset(write(tmp_path / "a.jsonl", [row(1)]), return_raw_chat=True)
    assert data[0]["raw_prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]


def test_plain_text_prompts_under_another_name_and_a_ground_truth_of_its_own(tmp_path):
    rows = [{"data_source": "gsm8k", "question": "One?", "ground_truth": "1"}]
    data = dataset(write(tmp_path / "a.parquet", rows), prompt_key="question")
    data.validate()
    item = data[0]
    assert TOKENIZER.decode(item["input_ids"][item["attention_mask"].bool()]) == "<|user|>One?<|end|><|assistant|>"
    assert item["reward_model"] == {"style": "rule", "ground_truth": "1"}
    assert (item["extra_info"], item["index"], item["ground_truth"]) == ({}, 0, "1")


def test_a_data_source_inside_a_struct_is_the_source_of_the_row(tmp_path):
    rows = [row(0, data_source=None, info={"src": "openai/gsm8k"}), row(1, data_source=None, info={"other": 1})]
    data = dataset(write(tmp_path / "a.jsonl", rows), reward_fn_key="info.src")
    assert [data[number]["info.src"] for number in range(2)] == ["openai/gsm8k", "unknown"]


def test_a_template_function_of_the_user_replaces_the_tokenizers(tmp_path):
    file = write(tmp_path / "a.parquet", [row(1)])
    text = RLHFDataset(file, TOKENIZER, {}, chat_template_func=lambda messages: "Q: " + messages[-1]["content"])[0]
    assert TOKENIZER.decode(text["input_ids"][text["attention_mask"].bool()]) == "Q: What is 1 + 1?"
    ids = RLHFDataset(file, TOKENIZER, {}, chat_template_func=lambda messages: [7, 8, 9])[0]
    assert ids["input_ids"][ids["attention_mask"].bool()].tolist() == [7, 8, 9]


def test_a_template_that_is_given_writes_prompts_where_the_tokenizer_has_none(tmp_path, caplog):
    bare = tiny_tokenizer()
    template, bare.chat_template = bare.chat_template, None
    file = write(tmp_path / "a.parquet", [row(1)])
    item = RLHFDataset(file, bare, {"apply_chat_template_kwargs": {"chat_template": template}})[0]
    assert torch.equal(item["input_ids"], RLHFDataset(file, TOKENIZER, {})[0]["input_ids"])
    assert "no chat template" not in caplog.text


def test_a_system_prompt_is_said_first_where_a_row_brings_none(tmp_path):
    own = [{"role": "system", "content": "mine"}, *said("hi")]
    file = write(tmp_path / "a.jsonl", [row(0, prompt="hi"), row(1, prompt=own)])
    data = dataset(file, system_prompt="be brief", return_raw_chat=True)
    texts = [TOKENIZER.decode(item["input_ids"][item["attention_mask"].bool()]) for item in (data[0], data[1])]
    assert texts == [
        "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>",
        "<|system|>mine<|end|><|user|>hi<|end|><|assistant|>",
    ]
    assert data[0]["raw_prompt"][0] == {"role": "system", "content": "be brief"}


def test_a_prompt_that_the_template_refuses_is_named_with_its_place(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    rows = [row(0), row(1, prompt=[{"role": "system", "content": "x"}, *said("y")])]
    expected = r"a\.parquet row 1: .*\(TemplateError: no system role; roles: system, user"
    with pytest.raises(DataError, match=expected):
        RLHFDataset(write(tmp_path / "a.parquet", rows), tokenizer, {})


def test_a_prompt_inside_a_struct_is_named_with_dots(tmp_path):
    file = write(tmp_path / "a.parquet", [row(0, extra_info={"question": "One?", "index": 7})])
    item = dataset(file, prompt_key="extra_info.question")[0]
    assert TOKENIZER.decode(item["input_ids"][item["attention_mask"].bool()]) == "<|user|>One?<|end|><|assistant|>"
    assert (item["index"], item["extra_info"]["question"]) == (7, "One?")


def test_fields_that_a_columnar_file_filled_with_null_do_not_reach_the_template(tmp_path):
    rows = [
        row(0, prompt=[{"role": "user", "content": "hi", "name": "ann"}]),
        row(1, prompt=[{"role": "user", "content": "ho"}]),
    ]
    data = dataset(write(tmp_path / "a.parquet", rows), return_raw_chat=True)
    assert data[1]["raw_prompt"] == [{"role": "user", "content": "ho"}]


def test_several_files_with_different_columns_give_rows_with_the_same_fields(tmp_path):
    first = write(tmp_path / "a.parquet", [row(0)])
    second = write(
        tmp_path / "b.jsonl", [row(1, level=["x"], reward_model={"style": "rule", "ground_truth": [1, "1"]})]
    )
    data = dataset([first, second])
    batch = collate_fn([data[0], data[1]])
    assert batch["level"].tolist() == [None, ["x"]]
    assert batch["reward_model"][1]["ground_truth"] == [1, "1"]
    proto = DataProto.from_single_dict(batch)
    assert len(proto) == 2
    assert proto.batch["input_ids"].shape == (2, 64)


def test_uids_outlive_filtering_other_names_and_another_order_of_files(tmp_path):
    rows = [row(0), row(0), row(1, prompt=said("x" * 100)), row(2)]
    uids = dataset(write(tmp_path / "a.parquet", rows), max_prompt_length=200).uids()
    assert len(set(uids)) == 4
    assert dataset(write(tmp_path / "moved.jsonl", rows)).uids() == [uids[0], uids[1], uids[3]]
    first, second = write(tmp_path / "b.json", rows[:2]), write(tmp_path / "c.parquet", rows[2:])
    turned = dataset([second, first], max_prompt_length=200)
    assert turned.uids() == [*uids[2:], *uids[:2]]
    assert [turned[number]["uid"] for number in range(4)] == turned.uids()


def test_a_column_with_a_name_of_ours_is_kept_under_another_and_said_once(tmp_path, caplog):
    given = {"uid": 17, "data_uid": "x", "sample_index": 3, "do_sample": False, "responses": "r", "index": 5}
    data = dataset(write(tmp_path / "a.jsonl", [row(i, **given) for i in range(3)]))
    plain = dataset(write(tmp_path / "b.jsonl", [row(i) for i in range(3)]))
    assert data.uids() == plain.uids()
    items = [data[i] for i in range(3)]
    assert [item["uid"] for item in items] == plain.uids()
    assert items[1]["data_data_uid"] == 17, "the name that comes next is taken"
    assert items[1]["data_uid"] == "x"
    kept = {name: items[1][f"data_{name}"] for name in ("sample_index", "do_sample", "responses", "index")}
    assert kept == {"sample_index": 3, "do_sample": False, "responses": "r", "index": 5}
    assert items[1]["index"] == 1
    assert not items[1].keys() & {"sample_index", "do_sample", "responses"}
    assert caplog.text.count("'uid' is named 'data_data_uid' in batches") == 1
    assert data.column("uid") == [17] * 3, "a sampler asks for columns of the file"


def test_the_column_that_names_the_reward_function_cannot_have_a_name_of_ours(tmp_path):
    with pytest.raises(DataError, match=r"(?s)data\.reward_fn_key.*'uid'"):
        dataset(write(tmp_path / "a.jsonl", [row(uid="gsm8k")]), reward_fn_key="uid")


def test_a_column_holds_the_rows_of_the_dataset_and_no_others(tmp_path):
    data = dataset(write(tmp_path / "a.jsonl", [row(0), row(1, prompt="x" * 100), row(2, level=3)]))
    assert data.column("level") == [None, 3]


def test_prompts_longer_than_the_limit_are_filtered_and_max_samples_takes_the_first_rows(tmp_path):
    file = write(tmp_path / "a.parquet", [row(0), row(1, prompt=said("long " * 30)), row(2)])
    assert [dataset(file)[i]["index"] for i in range(2)] == [0, 2]
    assert len(RLHFDataset(file, TOKENIZER, {"max_prompt_length": 64}, max_samples=2)) == 1


@pytest.mark.parametrize(("how", "kept"), [("left", slice(-64, None)), ("right", slice(0, 64))])
def test_longer_prompts_are_cut_from_the_side_asked_for(tmp_path, how, kept):
    file = write(tmp_path / "a.jsonl", [row(1, prompt="".join(chr(97 + i % 26) for i in range(100)))])
    ids = dataset(file, filter_overlong_prompts=False, truncation=how)[0]["input_ids"].tolist()
    whole = dataset(file, max_prompt_length=200)[0]
    assert ids == whole["input_ids"][whole["attention_mask"].bool()].tolist()[kept]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 30))
def test_truncation_keeps_both_ends_in_the_middle_mode_and_never_more_than_the_limit(ids, limit):
    cut = truncate(ids, limit, "middle").tolist()
    assert len(cut) == min(len(ids), limit)
    head = len(cut) // 2
    assert cut[:head] == ids[:head]
    assert cut[head:] == ids[len(ids) - (len(cut) - head) :]


@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_truncation_to_no_token_keeps_none(how):
    assert truncate([1, 2, 3], 0, how).tolist() == []


def test_a_dictconfig_and_dataset_folders_are_accepted(tmp_path):
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "set" / "dataset_infos.json").write_text("{}")
    (tmp_path / "set" / "README.md").write_text("about")
    write(folder / "train-00000-of-00002.parquet", [row(0)])
    write(folder / "train-00001-of-00002.parquet", [row(1)])
    config = OmegaConf.create({"max_prompt_length": 64})
    assert len(RLHFDataset(str(tmp_path / "set"), TOKENIZER, config)) == 2
    write(folder / "test-00000-of-00001.parquet", [row(2)])
    assert RLHFDataset(str(tmp_path / "set"), TOKENIZER, config, split="test")[0]["index"] == 2
    assert len(RLHFDataset(str(tmp_path / "set"), TOKENIZER, config, split="train")) == 2
    with pytest.raises(ValueError, match=r"/set: .*test-00000-of-00001\.parquet, train-00000-of-00002\.parquet"):
        RLHFDataset(str(tmp_path / "set"), TOKENIZER, config)


def test_a_dataset_survives_pickling_for_spawned_loader_workers(tmp_path):
    data = dataset([write(tmp_path / "a.parquet", [row(0)]), write(tmp_path / "b.jsonl", [row(1)])])
    again = pickle.loads(pickle.dumps(data))
    for number in range(2):
        assert again[number]["uid"] == data[number]["uid"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(0), {"data_source": "x"}], r"a\.jsonl line 2: .*'prompt'.*data\.prompt_key"),
        ([row(0), row(1, prompt=None)], r"line 2: 'prompt' .*\bnull\b"),
        ([row(0), row(1, prompt=17), row(2, prompt=18)], r"line 2 \(and 1 more row\): 'prompt' .*\bint\b"),
        ([row(0, prompt=[])], r"line 1: 'prompt' .*messages"),
        ([row(0, prompt="")], r"line 1: 'prompt' .*empty"),
        ([row(0, prompt=[{"content": "hi"}])], r"line 1: message 0 of 'prompt' .*'role' \(found: content\)"),
        ([row(0, prompt=[{"role": "user", "content": 3}])], r"line 1: .*'content' of message 0 of 'prompt' .*\bint\b"),
        (
            [row(0, prompt=[{"role": "user", "content": [["a", {"b": 1}]]}])],
            r"line 1: .*'content' of message 0 of 'prompt' .*part 0 .*\blist\b",
        ),
        (
            [row(0, prompt=[{"role": "user", "content": [{"b": [1, 2]}]}])],
            r"line 1: .*'content' of message 0 of 'prompt' .*part 0 .*'type'",
        ),
        (
            [row(0, prompt=[{"role": "user", "content": []}])],
            r"line 1: .*'content' of message 0 of 'prompt' .*empty list",
        ),
    ],
)
def test_bad_prompts_are_refused_with_file_line_and_remedy(tmp_path, rows, expected):
    with pytest.raises(ValueError, match=expected):
        dataset(write(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            {"question": ["a"], "answer": ["b"]},
            r"a\.parquet row 0: .*'prompt' .*data\.prompt_key .*: question, answer\.",
        ),
        ({"prompt": [1, 2]}, r"row 0 \(and 1 more row\): 'prompt' .*\bint\b"),
        ({"prompt": ["ok", None, None]}, r"row 1 \(and 1 more row\): 'prompt' .*\bnull\b"),
        ({"prompt": [[{"role": "user", "content": "a"}], []]}, r"row 1: 'prompt' .*messages"),
        ({"prompt": [[{"role": None, "content": "a"}]]}, r"row 0: message 0 of 'prompt' .*'role'"),
        ({"prompt": pa.array([], pa.string())}, r"a\.parquet: .*rows"),
    ],
)
def test_bad_columns_of_parquet_files_are_refused(tmp_path, table, expected):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=expected):
        dataset(str(tmp_path / "a.parquet"))


def test_files_that_cannot_be_read_say_where_and_what_to_do(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row(0)) + "\n{half")
    with pytest.raises(ValueError, match=r"(?s)a\.jsonl.*line 2"):
        dataset(str(tmp_path / "a.jsonl"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(ValueError, match=r"b\.parquet"):
        dataset(str(tmp_path / "b.parquet"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty\.jsonl"):
        dataset(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"missing\.parquet"):
        dataset(str(tmp_path / "missing.parquet"))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        dataset(str(tmp_path / "notes.txt"))


def test_an_overlong_prompt_with_truncation_error_is_refused_before_training(tmp_path):
    file = write(tmp_path / "a.parquet", [row(0), row(1, prompt=said("long " * 30))])
    with pytest.raises(DataError, match=r"(?s)row 1.*data\.max_prompt_length"):
        dataset(file, filter_overlong_prompts=False)
    with pytest.raises(DataError, match=r"b\.parquet: .*\b1 prompts.*data\.max_prompt_length = 64\b.*\b153\b"):
        dataset(write(tmp_path / "b.parquet", [row(1, prompt=said("long " * 30))]))


def test_validate_reports_everything_that_would_stop_scoring_at_once(tmp_path):
    rows = [row(0), row(1, data_source="openai/gsm8l"), row(2, reward_model={"style": "rule"}), row(3, data_source=5)]
    data = dataset(write(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError) as caught:
        data.validate(data_sources=["openai/gsm8k"])
    problems = caught.value.problems
    assert len(problems) == 3
    assert "line 4: 'data_source' is a int" in problems[0]
    assert "line 2" in problems[1]
    assert "Did you mean 'openai/gsm8k'?" in problems[1]
    assert "line 3: the row has no ground truth" in problems[2]


def test_rows_that_their_agent_scores_need_no_reward_function(tmp_path):
    rows = [row(0, data_source="game", reward_model={"style": "agent"})]
    dataset(write(tmp_path / "a.parquet", rows)).validate(data_sources=["openai/gsm8k"])


def test_rows_judged_by_a_model_need_no_ground_truth(tmp_path):
    rows = [row(0, reward_model={"style": "model", "ground_truth": None})]
    dataset(write(tmp_path / "a.parquet", rows)).validate()
    without = [{name: value for name, value in row(0).items() if name != "reward_model"}]
    data = dataset(write(tmp_path / "b.parquet", without))
    with pytest.raises(DataError, match=r"b\.parquet row 0: .*data\.ground_truth_key"):
        data.validate()
    data.validate(ground_truth=False)


def test_a_state_of_other_data_is_refused(tmp_path):
    data = dataset(write(tmp_path / "a.parquet", [row(0), row(1)]))
    other = dataset(write(tmp_path / "b.parquet", [row(0)]))
    with pytest.raises(ValueError, match=r"^data\.train_files: .*b\.parquet: 1\b.*\b2\b"):
        other.load_state_dict(data.state_dict())
    data.load_state_dict(data.state_dict())


def test_collate_stacks_tensors_and_keeps_everything_else_as_it_is():
    batch = collate_fn([{"x": torch.ones(2), "y": [1, 2]}, {"x": torch.zeros(2), "y": [3, 4]}])
    assert batch["x"].shape == (2, 2)
    assert batch["y"].dtype == np.dtype(object)
    assert batch["y"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"^collate_fn: .*\by\."):
        collate_fn([{"x": 1, "y": 2}, {"x": 1}])
