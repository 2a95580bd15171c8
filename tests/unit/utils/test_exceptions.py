"""Errors that name fields come out with the keys a user can set."""

from __future__ import annotations

import re

import pytest

from verl.config import RolloutConfig
from verl.utils.exceptions import fields_as_keys


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("name: cannot run this. Set name=hf.", "rollout.name: cannot run this. Set rollout.name=hf."),
        ("max_model_len: too long. Raise dtype.", "rollout.max_model_len: too long. Raise dtype."),
        ("engine_kwargs.native.model: unknown", "rollout.engine_kwargs.native.model: unknown"),
        ("request 'a': no room in max_model_len=4.", "request 'a': no room in rollout.max_model_len=4."),
        ("column 'max_new_tokens': its name and mode stop", "column 'max_new_tokens': its name and mode stop"),
        ("data.max_new_tokens, max_new_tokens_of_old", "data.max_new_tokens, max_new_tokens_of_old"),
    ],
)
def test_fields_are_spelled_as_keys_and_other_words_are_left(raised, told):
    with pytest.raises(ValueError, match=re.escape(told)) as caught, fields_as_keys("rollout", RolloutConfig):
        raise ValueError(raised)
    assert str(caught.value) == told
