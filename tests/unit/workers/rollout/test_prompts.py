"""Sampling parameters: the configuration's, then the batch's, then the call's."""

from __future__ import annotations

import pytest

from verl.config import RolloutConfig, as_config
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
    with pytest.raises(ValueError, match=r"sampling stop: .* strings that are not empty"):
        sampling_params(config, {})
