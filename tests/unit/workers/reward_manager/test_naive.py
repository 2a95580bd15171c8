"""The naive reward manager: scores on the right token, extra fields in order, failures by policy."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls, register
from verl.workers.reward_manager.naive import RewardError

WIDTH = 24  # of the batches


@pytest.fixture
def naive(manager):
    return functools.partial(manager, "naive")


def test_a_score_sits_on_the_last_token_that_the_model_sampled(naive, batch):
    reward = naive()(batch(["#### 72", "it is #### 73", "#### 72"]))
    assert reward.dtype == torch.float32
    expected = torch.zeros(3, WIDTH)
    expected[0, 7] = expected[2, 7] = 1.0  # seven characters and the end token
    assert torch.equal(reward, expected)


def test_with_tool_output_at_the_end_the_score_sits_on_the_models_own_last_token(naive, batch):
    own = [[1] * 4 + [0] * (WIDTH - 4), [0] * WIDTH]
    reward = naive()(batch(["#### 72", "#### 72"], masks=own))
    assert reward[0].nonzero().tolist() == [[3]]
    assert not reward[1].any()


def test_the_function_sees_only_the_tokens_that_are_there(naive, batch):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "text": solution_str, "truth": ground_truth, "index": extra_info["index"]}

    data = batch(["ab", "c"])
    data.batch["responses"][1, 3:] = 77  # whatever stands behind the end is not part of the answer
    extra = naive(compute_score, num_processes=1)(data, return_dict=True)["reward_extra_info"]
    assert extra["text"] == ["ab", "c"]
    assert extra["truth"] == ["72", "72"]
    assert extra["index"] == [0, 1]


def test_a_ground_truth_beside_the_reward_model_and_another_key_column_are_used(naive, batch):
    def compute_score(data_source, solution_str, ground_truth):
        return {"score": 0.0, "arguments": (data_source, ground_truth)}

    data = batch(["x"], reward_model=[{"style": "rule"}], ground_truth=["7"], task=["sums"])
    manager = naive(compute_score, reward_fn_key="task", num_processes=0)
    assert manager(data, return_dict=True)["reward_extra_info"]["arguments"] == [("sums", "7")]
    with pytest.raises(ValueError, match=r"(?s)data\.reward_fn_key.*'level'"):
        naive(None, reward_fn_key="level", num_processes=0)(data)


def test_scores_of_a_reward_model_are_the_result(naive, batch):
    data = batch(["x"])
    data.batch["rm_scores"] = torch.full((1, WIDTH), 0.5)
    assert torch.equal(naive()(data), data.batch["rm_scores"])
    assert naive()(data, return_dict=True)["reward_extra_info"] == {}


def sometimes_failing(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1 / (1 - extra_info["index"]), "acc": 1.0}


@pytest.mark.parametrize("policy", ["zero", "mask"])
def test_failed_samples_score_zero_are_counted_and_shown_once(naive, policy, caplog, batch):
    manager = naive(sometimes_failing, on_error=policy, num_processes=0)
    with caplog.at_level(logging.WARNING, logger="verl"):
        result = manager(batch(["a", "b", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, -1.0]
    assert result["reward_extra_info"]["scoring_failed"] == [0.0, 1.0, 0.0]
    assert result["reward_extra_info"]["scoring_error"] == [None, "raised", None]
    assert result["reward_extra_info"]["acc"] == [1.0, None, 1.0]
    assert "1 of 3 samples could not be scored: 1 raised" in caplog.text
    assert "The first, row 1: " in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "answer: 'b'" in caplog.text


def test_the_policy_fail_stops_with_the_example(naive, batch):
    with pytest.raises(RewardError, match=r"(?s)\b1 of 3 samples.*ZeroDivisionError.*answer: 'b'"):
        naive(sometimes_failing, on_error="fail", num_processes=0)(batch(["a", "b", "c"]))
    with pytest.raises(ValueError, match=r"(?s)reward_model\.on_error.*'ignore'"):
        naive(on_error="ignore")


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        (["hm", "so"], "no text has an answer in the expected format"),
        (["#### 1", "hm"], "1 texts have an answer, and all are wrong"),
    ],
)
def test_a_first_batch_of_zeros_says_why(naive, caplog, texts, cause, batch):
    manager = naive(num_processes=0)
    with caplog.at_level(logging.WARNING, logger="verl"):
        manager(batch(texts))
        manager(batch(texts))
    assert caplog.text.count(cause) == 1


def test_as_many_samples_per_source_are_logged_as_asked_for(naive, caplog, batch):
    data = batch(["#### 72", "#### 72", "#### 72"], data_source=["openai/gsm8k", "openai/gsm8k", "gsm8k"])
    with caplog.at_level(logging.INFO, logger="verl"):
        naive(num_examine=1, num_processes=0)(data)
    assert caplog.text.count("score 1") == 2


def test_managers_are_registered_by_name():
    assert get_reward_manager_cls("naive") is NaiveRewardManager

    @register("mine")
    class Mine:
        pass

    assert get_reward_manager_cls("mine") is Mine
    with pytest.raises(ValueError, match=r"^reward_model.reward_manager: 'nave' .*'naive'"):
        get_reward_manager_cls("nave")
    with pytest.raises(ValueError, match="NaiveRewardManager"):
        register("naive")(Mine)


@pytest.mark.parametrize("name", ["naive", "batch", "prime", "dapo"])
def test_special_tokens_are_in_the_text_where_that_is_asked_for(manager, batch, name):
    """Also in what is scored ahead. The tokenizer is a real one, with an end of turn that is a special token."""
    texts = {True: ["#### 72", ""], False: ["#### 72<|end|>", "<|end|>"]}
    for skip, expected in texts.items():
        made = manager(name, num_processes=1, skip_special_tokens=skip)
        data = batch(["#### 72", ""])
        assert [sample.solution_str for sample in made.samples(data)] == expected
    ahead = made.score_ahead(data.non_tensor_batch)
    ahead.add([(0, data.batch["responses"][0, :5].numpy())])
    sample, future = ahead.take(0, data.batch["responses"][0, :5].numpy())
    assert sample.solution_str == made.tokenizer.decode(data.batch["responses"][0, :5])
    assert future.result().error is None
