"""The tables between Hugging Face tensors and Megatron-Core's shards are the same read in both directions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from verl.models.loading import empty_model
from verl.models.megatron_core import CoreArchitecture, CoreWeight, padded_vocab, shard_slices, weight_map

_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 131,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_experts": 4}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma": {"num_key_value_heads": 1},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0]},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 2},
}


@lru_cache
def _config(model: str) -> Any:
    kwargs = {**_SHAPE, **_MODELS[model]}
    if model == "qwen2_moe":
        del kwargs["head_dim"]
    return transformers.AutoConfig.for_model(model.partition(",")[0], **kwargs)


def _tensors(model: str, kind: Any = "causal_lm") -> dict[str, torch.Tensor]:
    """Every weight as transformers names it, each element another number."""
    skeleton = empty_model(_config(model), kind, torch.float32)
    values = torch.arange(10**6, dtype=torch.float32)
    found, at = {}, 0
    for name, value in skeleton.state_dict().items():
        found[name] = values[at : at + value.numel()].view(value.shape)
        at += value.numel()
    return found


def _shard(
    weight: CoreWeight, arch: CoreArchitecture, rank: int, size: int, tensors: dict[str, torch.Tensor], stored: bool
) -> torch.Tensor:
    shard = torch.full(weight.shard_shape(size), -1.0)
    for piece in shard_slices(weight, arch, rank, size, stored=stored):
        shard[piece.place] = tensors[piece.hf][piece.source]
    return shard


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("model", _MODELS)
def test_shards_hold_every_weight_once_and_give_it_back(model: str, size: int) -> None:
    arch, tensors = CoreArchitecture.from_config(_config(model)), _tensors(model)
    back = {name: torch.full_like(value, -1.0) for name, value in tensors.items()}
    for weight in weight_map(arch, "causal_lm"):
        for rank in range(size if weight.split is not None else 1):
            shard = _shard(weight, arch, rank, size, tensors, stored=False)
            for piece in shard_slices(weight, arch, rank, size):
                target = back[piece.hf][piece.source]
                assert weight.copy_of or bool((target == -1).all()), f"{weight.name} has {piece} twice"
                target.copy_(shard[piece.place])
    tied = {"lm_head.weight"} if arch.tied else set()
    assert {name for name, value in back.items() if not torch.equal(value, tensors[name])} == tied


@pytest.mark.parametrize("model", _MODELS)
def test_checkpoints_on_disk_give_the_same_shards(model: str) -> None:
    """Of transformers' own names: what `save_pretrained` takes apart."""
    arch, tensors = CoreArchitecture.from_config(_config(model)), _tensors(model)
    disk = dict(revert_weight_conversion(empty_model(_config(model), "causal_lm", torch.float32), dict(tensors)))
    for weight in weight_map(arch, "causal_lm"):
        for rank in range(2):
            both = [_shard(weight, arch, rank, 2, names, names is disk) for names in (tensors, disk)]
            assert torch.equal(*both), weight.name
    read = {
        piece.hf for weight in weight_map(arch, "causal_lm") for piece in shard_slices(weight, arch, 0, 1, stored=True)
    }
    assert read == {name for name in disk if not (arch.tied and name == "lm_head.weight")}


def test_a_shard_is_what_core_multiplies_with() -> None:
    """Groups of queries, each with its key and value; gate above up; on each rank its own."""
    arch, tensors = CoreArchitecture.from_config(_config("qwen3")), _tensors("qwen3")
    weights = {weight.name: weight for weight in weight_map(arch, "causal_lm")}
    prefix = "model.layers.1."
    q, k, v = (tensors[f"{prefix}self_attn.{each}_proj.weight"].view(2, -1, 8, 16) for each in "qkv")
    for rank in range(2):
        qkv = _shard(weights["decoder.layers.1.self_attention.linear_qkv.weight"], arch, rank, 2, tensors, False)
        assert torch.equal(qkv.view(4, 8, 16), torch.cat([q[rank], k[rank], v[rank]]))
        gate_up = _shard(weights["decoder.layers.1.mlp.linear_fc1.weight"], arch, rank, 2, tensors, False)
        gate, up = (tensors[f"{prefix}mlp.{each}_proj.weight"].chunk(2)[rank] for each in ("gate", "up"))
        assert torch.equal(gate_up, torch.cat([gate, up]))
        output = _shard(weights["decoder.layers.1.self_attention.linear_proj.weight"], arch, rank, 2, tensors, False)
        assert torch.equal(output, tensors[f"{prefix}self_attn.o_proj.weight"].chunk(2, dim=1)[rank])


def test_padding_of_the_vocabulary_is_nobodys() -> None:
    """131 tokens over 2 ranks of 128 rows each: the second has 3."""
    arch = CoreArchitecture.from_config(_config("qwen2"))
    embedding, output = weight_map(arch, "causal_lm")[0], weight_map(arch, "causal_lm")[-1]
    assert padded_vocab(131, 2) == 256
    assert embedding.shard_shape(2) == (128, 16)
    assert [piece.source[0] for piece in shard_slices(embedding, arch, 1, 2)] == [slice(128, 131)]
    assert shard_slices(embedding, arch, 3, 4) == []
    assert output.hf == embedding.hf
    assert output.copy_of == embedding.name
    assert output.stage == "last"


@pytest.mark.parametrize(
    ("kind", "head"), [("value", ["score.weight", "score.bias"]), ("sequence_classification", ["score.weight"])]
)
def test_heads_have_the_shapes_of_the_models_in_memory(kind: Any, head: list[str]) -> None:
    arch, tensors = CoreArchitecture.from_config(_config("qwen2")), _tensors("qwen2", kind)
    weights = weight_map(arch, kind)
    assert [weight.name for weight in weights if weight.name.startswith(("score", "output"))] == head
    assert {name for weight in weights for name in weight.hf} == set(tensors)
    assert all(weight.shape == tensors[weight.name].shape for weight in weights if weight.name in tensors)


def test_ranks_that_cannot_share_a_weight_are_told_which() -> None:
    arch = CoreArchitecture.from_config(_config("qwen2"))
    with pytest.raises(ValueError, match=r"(?s)tensor_model_parallel_size.*linear_qkv"):
        [weight.shard_shape(5) for weight in weight_map(arch, "causal_lm")]
