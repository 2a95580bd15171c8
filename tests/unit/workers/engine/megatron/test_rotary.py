"""Angles of packed tokens turn queries and keys as transformers' module does, for every kind that it knows."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.tiny import tiny_config
from verl.workers.engine.megatron.rotary import Rotary

FACTORS = [1.0 + place for place in range(16)]
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": FACTORS,
        "long_factor": [2 * factor for factor in FACTORS],
    },
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("longest", [20, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_cosines_and_sines_are_those_of_transformers(kind, longest):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]}
    config = tiny_config("llama", head_dim=32, max_position_embeddings=64, rope_parameters=rope)
    positions = torch.cat([torch.arange(longest), torch.arange(7)])[None]
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), positions)
    rotary = Rotary(config)
    angles = rotary(positions, longest)
    assert angles.shape == (longest + 7, 1, 1, 32)
    scaling = theirs.attention_scaling
    assert torch.equal(angles[:, 0, 0].cos() * scaling, cos[0])
    assert torch.equal(angles[:, 0, 0].sin() * scaling, sin[0])
    assert rotary.softmax_scale == pytest.approx(32**-0.5 * scaling**2)
    assert (kind in ("yarn", "longrope")) == (scaling != 1.0)


def test_a_part_of_a_head_that_is_turned_and_scaled_is_refused():
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, **KINDS["yarn"]}
    config = tiny_config("llama", head_dim=32, max_position_embeddings=64, rope_parameters=rope)
    with pytest.raises(ValueError, match=r"rope_parameters"):
        Rotary(config)
