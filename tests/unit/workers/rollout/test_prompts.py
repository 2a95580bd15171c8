"""Sampling parameters: the configuration's, then the batch's, then the call's, then a row's own limit of tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.requests import requests_of
from verl.config import RolloutConfig, as_config
from verl.protocol import DataProto, object_array
from verl.workers.rollout.prompts import sampling_params


def test_stop_strings_come_from_the_configuration_the_batch_or_the_call_and_the_last_one_wins():
    config = as_config(RolloutConfig, {"max_new_tokens": 4, "stop": ["</answer>", "\n\n"]})
    assert sampling_params(config, {}).stop == ("</answer>", "\n\n")
    assert sampling_params(config, {"stop": ["x"]}).stop == ("x",)
    assert sampling_params(config, {"stop": ["x"]}, stop="</search>").stop == ("</search>",)
    assert sampling_params(config, {}, stop=[]).stop == ()
    assert sampling_params(as_config(RolloutConfig, {"max_new_tokens": 4}), {}).stop == ()


def test_an_empty_stop_string_is_refused():
    config = as_config(RolloutConfig, {"max_new_tokens": 4, "stop": [""]})
    with pytest.raises(ValueError, match="sampling stop: "):
        sampling_params(config, {})


def limits_of(column, sample_index):
    prompts = DataProto.from_dict(
        {name: torch.ones(len(column), 3, dtype=torch.long) for name in ("input_ids", "attention_mask")},
        {"uid": object_array(["a"] * len(column)), "sample_index": object_array(sample_index)},
    )
    prompts.non_tensor_batch["max_new_tokens"] = object_array(column)
    params = sampling_params(as_config(RolloutConfig, {"max_new_tokens": 16}), {})
    return [request.params.max_new_tokens for request in requests_of(prompts, params, seed=0)]


def test_a_row_may_shorten_its_answers_and_each_sample_of_a_prompt_its_own():
    assert limits_of([4, None, 99], [0, 1, 2]) == [4, 16, 16]
    assert limits_of([[5, 7, 99]] * 3, [2, 0, 1]) == [16, 5, 7]


def test_a_sample_without_a_limit_in_its_rows_list_is_refused():
    with pytest.raises(ValueError, match=r"^column 'max_new_tokens': .*\b2\b"):
        limits_of([[5, 7]], [2])
