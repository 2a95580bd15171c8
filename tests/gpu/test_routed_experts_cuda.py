"""On a GPU, with graphs and a step launched ahead: each token has the experts of the version that sampled it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.router_cases import moe_model
from tests.unit.inference.test_engine_parity import MAX_LENGTH, prompts
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.graphs import GraphOptions
from verl.inference.model_runner import KVCache, ModelRunner
from verl.inference.models.generic import GenericModel
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.models.routing import record_routes, routers
from verl.types.request import Output, Request, SamplingParams

pytestmark = pytest.mark.gpu

BLOCK, SEQUENCES = 16, 8
SPARSE = [0, 2]
"""Layers with experts."""


class Versions:
    """An engine whose routers change, and the models of transformers of each version."""

    def __init__(self, num_blocks: int) -> None:
        from verl.inference.kernels.paged_attention import TritonAttention  # triton exists only beside a GPU

        model = GenericModel(moe_model("qwen3_moe"), MAX_LENGTH, device="cuda:0")
        kv = KVCache(model, num_blocks, BLOCK)
        kv.record_experts(model)
        runner = ModelRunner(model, TritonAttention(), kv, SEQUENCES, MAX_LENGTH, GraphOptions(32, 2**20))
        blocks = BlockManager(num_blocks, BLOCK)
        self.engine = Engine(Scheduler(blocks, SEQUENCES, 32, MAX_LENGTH, returns_experts=True), runner)
        self.weights, self.models = model.named_weights(), []
        self._add(0)

    def _add(self, seed: int) -> None:
        model = moe_model("qwen3_moe").cuda()
        torch.manual_seed(100 + seed)
        for router in routers(model).values():
            torch.nn.init.normal_(router.weight, std=1.0)
        for name, weight in model.state_dict().items():
            self.weights[name].copy_(weight)
        model.seen = {}
        record_routes(model, model.seen.__setitem__)
        self.models.append(model)

    def update(self) -> None:
        self.engine.drain()
        self._add(len(self.models))
        self.engine.preempt_all()
        self.engine.version += 1

    def equal_share(self, prompt: list[int], output: Output) -> float:
        """Of the choices, those of the version that sampled the next token; rounding decides between close ones."""
        tokens = torch.tensor([[*prompt, *output.token_ids][:-1]], device="cuda:0")
        chosen = []
        for model in self.models:
            with torch.no_grad():
                model(tokens, use_cache=False)
            chosen.append(torch.stack([model.seen[layer] for layer in SPARSE], dim=1).cpu())
        versions = [output.versions[0]] * (len(prompt) - 1) + output.versions
        wanted = torch.stack([chosen[version][place] for place, version in enumerate(versions)])
        found = torch.from_numpy(output.routed_experts)[:, SPARSE].long()
        return (found.sort(-1).values == wanted.sort(-1).values).float().mean().item()


@pytest.mark.parametrize("num_blocks", [80, 12])
def test_through_updates_aborts_and_resumes(num_blocks):
    """With few blocks sequences give way to others, whose tokens are written over theirs in the next step."""
    versions = Versions(num_blocks)
    params = SamplingParams(max_new_tokens=24)
    asked = [Request(f"{n}", prompts()[n % 4], replace(params, key=n), group=f"{n % 4}") for n in range(SEQUENCES)]
    sequences = [Sequence(request, serial) for serial, request in enumerate(asked)]
    versions.engine.add(sequences)
    for step in range(1, 4000):
        if not versions.engine.has_work:
            break
        versions.engine.step()
        if step in (7, 15):
            versions.update()
            aborted = [sequence for sequence in sequences if not sequence.done][::2]
            versions.engine.remove(aborted)
            resumed = [
                Sequence(replace(one.request, id=f"{one.request.id}'", resume_from=one.output), 100 * step + serial)
                for serial, one in enumerate(aborted)
            ]
            sequences = [one for one in sequences if one not in aborted] + resumed
            versions.engine.add(resumed)
    assert not versions.engine.has_work
    assert sum(len(set(one.output.versions)) > 1 for one in sequences) >= SEQUENCES // 2
    for one in sequences:
        assert len(one.output.routed_experts) == len(one.prompt_ids) + 23
        assert versions.equal_share(one.prompt_ids, one.output) > 0.97
