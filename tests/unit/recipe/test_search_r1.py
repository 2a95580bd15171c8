"""The tiny Search-R1 task: what demonstrations teach is what the search agent does, and the corpus has every answer."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from recipe.report import summary
from recipe.search_r1.demonstrations import Demonstrations
from recipe.search_r1.task import make_task
from verl.agent.search_loop import ObservationEncoder, parse_action
from verl.config import SFTConfig, load_config
from verl.search.retriever import open_retriever
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer import hf_tokenizer

pytest.importorskip("bm25s")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder, rows={"sft": 200, "train": 64, "val": 32})
    return folder


def rows_of(task, split):
    return pq.read_table(task / f"{split}.parquet").to_pylist()


def test_the_words_of_a_question_find_its_answer_first(task, tmp_path):
    retriever = open_retriever(str(task / "corpus.jsonl"), index_path=str(tmp_path))
    for row in rows_of(task, "val") + rows_of(task, "train"):
        (hits,) = retriever.retrieve([row["prompt"][0]["content"]], 1)
        (value,) = row["reward_model"]["ground_truth"]["target"]
        assert hits[0].document.contents.endswith(f" is {value}.")
        said, truth = f"<answer> {value} </answer>", row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], said, truth) == 1.0


def test_no_question_of_the_test_is_trained_on(task):
    asked = {split: {row["prompt"][0]["content"] for row in rows_of(task, split)} for split in ("train", "val")}
    assert not asked["train"] & asked["val"]


def test_demonstrations_are_token_for_token_what_the_agent_puts_together(task):
    tokenizer = hf_tokenizer(str(task / "model"))
    overrides = [f"data.train_files={task / 'sft.parquet'}", "model.path=a/b", "data.max_length=80"]
    config = load_config(None, overrides, check_files=False, root=SFTConfig).data
    data = Demonstrations(config.train_files, tokenizer, config)
    encoder = ObservationEncoder(tokenizer, "<information>", "</information>", 80)
    searched = 0
    for item, row in enumerate(rows_of(task, "sft")):
        ids, mask = data[item]["input_ids"].tolist(), data[item]["loss_mask"].tolist()
        assert tokenizer.unk_token_id not in ids
        *search, answer = row["turns"]
        assert parse_action(answer["text"]).kind == "answer"
        if search:
            searched += 1
            assert parse_action(search[0]["text"]).kind == "search"
            environment = [token for token, ours in zip(ids, mask, strict=True) if not ours]
            assert environment[-len(encoder.wrap(search[1]["text"])) :] == encoder.wrap(search[1]["text"])
    assert 20 < searched < 80  # a teacher that guesses most of the time


def test_the_report_counts_searches_and_right_answers():
    answers = [{"output": "<answer> a </answer>", "score": 0.0}, {"output": "x <information> y", "score": 1.0}]
    assert summary(answers, "<information>") == (0.5, 0.5)
