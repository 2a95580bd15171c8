"""Weights on their way to an engine of other make have the names and shapes of the files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_config, tiny_model
from verl.models.loading import empty_model
from verl.workers.rollout.weights import checkpoint_tensors

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
        ("mixtral", EXPERTS),
    ],
    ids=["plain", "tied", "experts", "experts under other names"],
)
def test_a_bucket_is_what_is_stored(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    skeleton = empty_model(tiny_config(family, **changes), "causal_lm", torch.float32)
    items = list(model.state_dict().items())
    found: dict[str, torch.Tensor] = {}
    for first in range(0, len(items), 3):
        found.update(checkpoint_tensors(dict(items[first : first + 3]), skeleton))
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor), name
