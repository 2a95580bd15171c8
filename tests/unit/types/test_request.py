"""SamplingParams: a copy with another noise key."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from verl.types.request import SamplingParams


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(key=3, temperature=0.5, top_k=4, stop=("a",), logit_bias=((1, 2.0),))],
)
def test_with_key_equals_replace(params: SamplingParams):
    before = replace(params)
    assert params.with_key(9) == replace(params, key=9)
    assert params == before
    assert pickle.loads(pickle.dumps(params.with_key(9))) == replace(params, key=9)
