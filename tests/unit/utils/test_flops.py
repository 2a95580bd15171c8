"""What a sequence costs, counted by hand from a model's shape."""

from __future__ import annotations

import json

import pytest

from verl.utils.flops import TOKENS, SequenceCost

SHAPE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def test_the_cost_of_a_small_shape_by_hand():
    """Per layer q and o 8×8 each, k and v 8×4 each, three MLP matrices 8×16: 576 weights, 2 operations each."""
    cost = SequenceCost.of_shape(SHAPE)
    assert cost.token == 2 * 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert cost.head == 2 * 8 * 100
    assert cost.pair == 2 * 2 * 8, "scores and values: 2 × 2 operations per pair and channel, of half the pairs"
    assert cost([10], [4]).tolist() == [10 * cost.token + 4 * cost.head + 100 * cost.pair]


def test_a_mixture_counts_the_experts_that_a_token_visits():
    dense, mixed = SequenceCost.of_shape(SHAPE), {**SHAPE, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert SequenceCost.of_shape(mixed).token == dense.token
    assert SequenceCost.of_shape({"text_config": SHAPE, "vocab_size": 1}) == dense


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size"])
def test_a_shape_under_other_names_counts_tokens(missing):
    assert SequenceCost.of_shape({name: value for name, value in SHAPE.items() if name != missing}) is TOKENS
    assert TOKENS([3, 4], [1, 1]).tolist() == [3, 4]


def test_a_folder_is_read_and_anything_else_counts_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert SequenceCost.of_folder(tmp_path) == SequenceCost.of_shape(SHAPE)
    assert SequenceCost.of_folder(tmp_path, {"num_hidden_layers": 4}).pair == 2 * SequenceCost.of_shape(SHAPE).pair
    assert SequenceCost.of_folder("some/hub-name") is TOKENS
