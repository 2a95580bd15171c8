"""Tokens of prompts: made once for the same files, model and template, never stale, never half a file."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import tiny_tokenizer
from verl.utils.dataset import chat, tokens
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.rows import Rows
from verl.utils.dataset.tokens import encode_prompts

TOKENIZER = tiny_tokenizer()


class Counting:
    """The tiny tokenizer, counting the texts it is given."""

    def __init__(self, **changes):
        self.texts = 0
        self.__dict__.update(changes)

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def __call__(self, texts, **kwargs):
        self.texts += len(texts)
        return TOKENIZER(texts, **kwargs)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "MIN_CACHED_ROWS", 0)
    monkeypatch.setattr(tokens, "CHUNK_ROWS", 4)
    return tmp_path / "cache" / "prompts"


def write(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "other": f"{prompt}!"}) + "\n" for prompt in prompts))
    return str(path)


def start(file, tokenizer=None, max_samples=-1, **config):
    """A dataset as a new process would make it, and how many texts it tokenised."""
    tokenizer = tokenizer or Counting()
    data = RLHFDataset(file, tokenizer, config, max_samples=max_samples)
    return [data[number]["input_ids"].tolist() for number in range(len(data))], tokenizer.texts


def test_a_second_start_tokenises_nothing_and_gives_the_same_rows(tmp_path, cache):
    file = write(tmp_path / "a.jsonl", [f"number {i}" for i in range(11)])
    first, tokenised = start(file)
    assert tokenised == 11
    assert start(file) == (first, 0)
    # Limits and truncation do not change tokens.
    assert start(file, max_prompt_length=9, filter_overlong_prompts=False, truncation="left")[1] == 0
    assert [path.suffix for path in cache.iterdir() if not path.name.startswith(".")] == [".arrow"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_key": "other"},
        {"system_prompt": "be brief"},
        {"apply_chat_template_kwargs": {"flag": True}},
        {"max_samples": 3},
        {"tokenizer": Counting(chat_template="{{ messages[0]['content'] }}")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_tokens_depend_on_makes_them_new(tmp_path, cache, change):
    file = write(tmp_path / "a.jsonl", ["one", "two", "three", "four"])
    start(file)
    again, tokenised = start(file, **change)
    assert tokenised == len(again) > 0


def test_a_file_that_changed_is_read_again(tmp_path, cache):
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    old, _ = start(file)
    os.utime(write(tmp_path / "a.jsonl", ["one", "owt"]), ns=(0, 0))  # of the same size
    new, tokenised = start(file)
    assert tokenised == 2
    assert (new[0], new[1] == old[1]) == (old[0], False)


def test_a_template_that_writes_the_day_is_not_kept_beyond_it(monkeypatch):
    encoder = PromptEncoder(Counting(chat_template="{{ strftime_now('%d %b %Y') }}"), {})
    today = encoder.fingerprint()

    class Tomorrow(chat.datetime.date):
        @classmethod
        def today(cls):
            return super().today() + chat.datetime.timedelta(days=1)

    monkeypatch.setattr(chat.datetime, "date", Tomorrow)
    assert encoder.fingerprint() != today


def test_starts_at_the_same_time_share_one_file(tmp_path, cache):
    file = write(tmp_path / "a.jsonl", [f"number {i}" for i in range(50)])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: start(file), range(4)))
    assert sorted(tokenised for _, tokenised in results) == [0, 0, 0, 50]
    assert all(rows == results[0][0] for rows, _ in results)
    assert [path.name for path in cache.iterdir() if "partial" in path.name] == []


def test_a_damaged_file_is_made_again(tmp_path, cache):
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    rows, _ = start(file)
    (kept,) = cache.glob("*.arrow")
    kept.write_bytes(kept.read_bytes()[:-40])
    assert start(file) == (rows, 2)
    assert start(file) == (rows, 0)


def test_a_cache_that_cannot_be_written_costs_time_and_no_run(tmp_path, cache, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "file"))
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    assert start(file)[1] == 2
    assert "cannot be stored" in caplog.text


def test_tokens_of_a_users_own_template_are_not_kept(tmp_path, cache):
    file = write(tmp_path / "a.jsonl", ["one"])
    for text in ("a", "bb"):
        data = RLHFDataset(file, TOKENIZER, {}, chat_template_func=lambda messages, text=text: text)
        assert int(data[0]["attention_mask"].sum()) == len(text)
    assert not cache.exists()


def test_kept_tokens_are_mapped_and_not_copied_into_each_process(tmp_path, cache):
    file = write(tmp_path / "a.jsonl", ["x" * 1000] * 500)
    rows, encoder = Rows([file]), PromptEncoder(TOKENIZER, {})
    encode_prompts(rows, 500, "prompt", encoder)
    before = pa.total_allocated_bytes()
    found = encode_prompts(rows, 500, "prompt", encoder)
    sent = pickle.dumps(found)
    again = pickle.loads(sent)
    assert pa.total_allocated_bytes() - before < 100_000 < found.tokens.lengths.sum()
    assert len(sent) < 1000
    assert np.array_equal(again.tokens[499], found.tokens[499])
    assert again.uid(499) == found.uid(499)


def test_tokens_that_are_not_kept_survive_pickling_too(tmp_path):
    rows = Rows([write(tmp_path / "a.jsonl", ["one", "two", "one"])])
    found = encode_prompts(rows, 3, "prompt", PromptEncoder(TOKENIZER, {}))
    again = pickle.loads(pickle.dumps(found))
    assert [again.uid(i) for i in range(3)] == [found.uid(i) for i in range(3)]
    assert np.array_equal(again.tokens[2], found.tokens[2])


@settings()  # it makes files and a thread, which a busy machine delays
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.randoms())
def test_uids_are_all_different_and_an_order_of_rows_does_not_change_the_set(tmp_path_factory, prompts, random):
    folder = tmp_path_factory.mktemp("uids")

    def uids(name, texts):
        found = encode_prompts(Rows([write(folder / name, texts)]), len(texts), "prompt", PromptEncoder(TOKENIZER, {}))
        return [found.uid(row) for row in range(len(texts))]

    given_order = uids("a.jsonl", prompts)
    assert len(set(given_order)) == len(prompts)
    # Equal words, equal name; the same one as the first is told by a number behind it.
    names = [uid.partition("-")[0] for uid in given_order]
    for i in range(len(prompts)):
        assert [name == names[i] for name in names] == [prompt == prompts[i] for prompt in prompts]
    other_order = random.sample(prompts, len(prompts))
    assert set(uids("b.jsonl", other_order)) == set(given_order)
    assert uids("c.jsonl", prompts[:3]) == given_order[:3]
