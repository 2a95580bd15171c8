"""Any model of the attention interface, packed and paged in every way, gives the logits of its own forward pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.paged_driver import PagedDriver
from tests.support.tiny import tiny_model
from verl.inference.models.generic import GenericModel

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
        "attn_implementation": "eager",
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {"sliding_window": 6},
    "gpt2": {},
    "mixtral": {},
}
LENGTHS = (23, 1, 9, 16, 5)


SHARED = 12


def texts() -> list[list[int]]:
    """Texts of those lengths; number 3 begins as number 0 does."""
    dice = random.Random(1)
    drawn = [[dice.randrange(5, 264) for _ in range(length)] for length in LENGTHS]
    drawn[3][:SHARED] = drawn[0][:SHARED]
    return drawn


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> tuple[GenericModel, list[torch.Tensor]]:
    """The paged model, and the logits of the module's own forward pass, text by text."""
    module = with_large_weights(tiny_model(request.param, **FAMILIES[request.param]))
    with torch.no_grad():
        expected = [module(torch.tensor([text]), use_cache=False).logits[0] for text in texts()]
    return GenericModel(module, max_length=64), expected


def with_large_weights(module: Any) -> Any:
    """Random models attend to everything alike; sharper attention makes a wrong mask or scale show."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "q_proj" in name or "k_proj" in name or "c_attn" in name or "qkv_proj" in name:
                parameter.mul_(20)
    return module


def test_ragged_prompts_in_one_pass(case):
    model, expected = case
    driver = PagedDriver(model, texts())
    driver.run(dict(enumerate(LENGTHS)))
    assert driver.worst_difference(expected) < 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 11])
def test_prompts_in_chunks(case, chunk):
    model, expected = case
    driver = PagedDriver(model, texts())
    while todo := {i: min(chunk, n - d) for i, (n, d) in enumerate(zip(LENGTHS, driver.done, strict=True)) if d < n}:
        driver.run(todo)
    assert driver.done == list(LENGTHS)
    assert driver.worst_difference(expected) < 1e-5


def test_decodes_beside_prefill_chunks_in_any_order(case):
    model, expected = case
    for seed in range(2):
        dice = random.Random(seed)
        driver = PagedDriver(model, texts())
        while left := [i for i, n in enumerate(LENGTHS) if driver.done[i] < n]:
            chosen = dice.sample(left, dice.randint(1, len(left)))
            decodes = tuple(i for i in chosen if driver.done[i] and dice.random() < 0.6)
            prefills = {i: dice.randint(1, LENGTHS[i] - driver.done[i]) for i in chosen if i not in decodes}
            driver.run(prefills, decodes)
        assert driver.worst_difference(expected) < 1e-5


def test_sequences_share_the_blocks_of_a_common_start(case):
    model, expected = case
    driver = PagedDriver(model, texts())
    driver.run({0: SHARED + 2, 1: 1, 2: 9, 4: 5})
    driver.share(0, 3, blocks=SHARED // driver.block_size)
    for _ in range(LENGTHS[3] - SHARED):
        driver.run({}, (3, 0))
    assert len(driver.logits[3]) == LENGTHS[3]
    assert driver.worst_difference(expected) < 1e-5


def test_weights_lie_in_one_region_and_ties_stay_ties():
    model = GenericModel(tiny_model("llama", tie_word_embeddings=True), max_length=64)
    weights = model.named_weights()
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    first = model.region.bytes.data_ptr()
    assert all(first <= tensor.data_ptr() < first + model.region.size for tensor in weights.values())


@pytest.mark.parametrize(
    ("family", "changes", "cause"),
    [
        ("mamba", {}, "MambaForCausalLM: .*KV cache"),
        ("bloom", {}, "BloomForCausalLM: .*attention interface"),
        ("llama4_text", {"head_dim": 16}, "Llama4ForCausalLM: .*chunked_attention"),
        ("gpt_oss", {"head_dim": 16, "layer_types": ["full_attention"] * 2}, r"GptOssForCausalLM: .*\d%"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "LlamaForCausalLM: .*512 tokens.*max_model_len is 513",
        ),
    ],
)
def test_models_that_cannot_run_paged_are_refused_by_name(family, changes, cause):
    with pytest.raises(ValueError, match=rf"{cause}.*name=hf"):
        GenericModel(tiny_model(family, **changes), max_length=513)


def test_an_encoder_is_refused():
    config = T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration: .*name=hf"):
        GenericModel(T5ForConditionalGeneration(config), max_length=64)
