"""The engine says through which experts every token went, however its KV came about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.tiny import tiny_model
from tests.unit.inference.test_engine_parity import GREEDY, MAX_LENGTH, Counting, answered, prompts
from verl.inference.attention.torch_attention import TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.kv_memory import KVMemory
from verl.inference.model_runner import ModelRunner
from verl.inference.models.generic import GenericModel
from verl.models.routing import note_routes
from verl.types.request import Request, SamplingParams

FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def engine_and_model(family: str, num_blocks: int = 80, **options) -> tuple[Engine, torch.nn.Module]:
    """An engine that notes experts, and the same model of transformers."""
    changes = {"num_hidden_layers": 3, **FAMILIES[family]}
    model = GenericModel(tiny_model(family, **changes), MAX_LENGTH)
    kv = KVMemory(model, num_blocks, 4)
    kv.note_experts(model)
    runner = ModelRunner(model, TorchAttention(), kv, 8, MAX_LENGTH, use_graphs=False)
    scheduler = Counting(BlockManager(num_blocks, 4), 8, experts_of=kv.experts_of, max_model_len=MAX_LENGTH, **options)
    return Engine(scheduler, runner), tiny_model(family, **changes)


def experts_of(model: torch.nn.Module, tokens: list[int]) -> dict[int, torch.Tensor]:
    found = {}
    note_routes(model, found.__setitem__)
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    return found


def assert_noted(model, requests, outputs):
    for request, output in zip(requests, outputs, strict=True):
        tokens = [*request.prompt_ids, *output.token_ids]
        noted, wanted = torch.from_numpy(output.routed_experts), experts_of(model, tokens[:-1])
        assert noted.dtype == torch.uint8
        assert noted.shape[:2] == (len(tokens) - 1, 3)
        for layer in range(3):
            if layer in wanted:
                assert torch.equal(noted[:, layer].long(), wanted[layer])
            else:
                assert (noted[:, layer] == 255).all(), "a dense layer"


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_token_also_where_its_prefix_was_there_already(family):
    engine, model = engine_and_model(family, max_num_batched_tokens=256)
    asked = [Request(f"r{i}", prompt, GREEDY, group=f"r{i}") for i, prompt in enumerate(prompts())]
    first = answered(engine, asked)
    assert_noted(model, asked, first)
    # The next turn: what was asked and answered is found in the cache.
    turn = [Request("turn", [*prompts()[0], *first[0].token_ids, 7, 8, 9], GREEDY)]
    before, outputs = engine.scheduler.prefilled, answered(engine, turn)
    assert engine.scheduler.prefilled - before < len(prompts()[0]), "it is not computed again"
    assert_noted(model, turn, outputs)


def test_of_samples_that_share_a_prompt_and_of_sequences_that_were_sent_back():
    engine, model = engine_and_model("qwen3_moe", num_blocks=11, max_num_batched_tokens=9)
    sampled = SamplingParams(max_new_tokens=12)
    asked = [Request(f"{n}", prompts()[0], replace(sampled, key=n), group="all") for n in range(3)]
    outputs = answered(engine, asked)
    assert sum(output.preemptions for output in outputs) > 0
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert_noted(model, asked, outputs)
