"""Configs that Megatron-Core can express are read whole; others are refused by field."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from verl.models.megatron_core import CoreArchitecture


def _of(model_type: str, **kwargs: Any) -> CoreArchitecture:
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return CoreArchitecture.from_config(AutoConfig.for_model(model_type, **{**shape, **kwargs}))


def test_every_family_is_told_apart() -> None:
    assert _of("qwen2").qkv_bias
    assert not _of("llama").qkv_bias
    assert not _of("qwen3").qkv_bias
    assert _of("qwen3").qk_norm
    assert not _of("qwen2").qk_norm
    gemma = _of("gemma")
    assert gemma.norm_adds_one
    assert gemma.embedding_scale == 4.0
    assert gemma.activation == "gelu_pytorch_tanh"
    assert _of("llama").head_dim == 4
    assert gemma.head_dim == 256
    assert _of("llama", rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope["rope_theta"] == 7.0


def test_layers_have_windows_where_their_config_says() -> None:
    assert _of("mistral", sliding_window=8).windows == (8, 8, 8, 8)
    assert _of("qwen2", sliding_window=8).windows == (None,) * 4
    assert _of("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3).windows == (None,) * 3 + (8,)


def test_layers_have_experts_where_their_config_says() -> None:
    mixtral, qwen = _of("mixtral").experts, _of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]).experts
    assert mixtral is not None
    assert mixtral.normalized
    assert all(mixtral.layers)
    assert mixtral.ffn == 14336
    assert qwen is not None
    assert not qwen.normalized
    assert qwen.layers == (False, True, False, False)
    assert _of("llama").experts is None


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("gemma2", "model_type", None),
        ("llama", "hidden_act", "relu"),
        ("llama", "attention_bias", True),
        ("qwen3", "attention_dropout", 0.1),
        ("mixtral", "router_jitter_noise", 0.1),
        ("gemma", "use_bidirectional_attention", True),
        ("qwen2", "layer_types", ["linear_attention"] * 4),
    ],
)
def test_what_core_cannot_express_is_refused_by_field(model_type: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is .*strategy=fsdp"):
        _of(model_type, **({} if value is None else {field: value}))
