"""Models whose attention has no kernel with bounded memory for shared prefixes."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from verl.models.prefix_support import precision_obstacle, sharing_obstacle


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("qwen2", {}, None),
        ("qwen3", {}, None),
        ("llama", {}, None),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("gemma2", {}, "window"),
        ("mistral", {"sliding_window": 64}, "window"),
        ("gemma2", {"layer_types": ["full_attention"] * 26}, "soft-capping"),
        ("deepseek_v3", {}, "latent"),
        ("llama", {"head_dim": 20}, "20"),
        ("llama", {"head_dim": 512}, "512"),
    ],
)
def test_obstacles(family, changes, word):
    reason = sharing_obstacle(AutoConfig.for_model(family, **changes).get_text_config())
    assert reason is None if word is None else word in str(reason)


def test_precisions():
    assert precision_obstacle("bf16") is precision_obstacle("fp16") is None
    assert "float32" in str(precision_obstacle("fp32"))
