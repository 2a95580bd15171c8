"""The engine says through which experts every token went, however its KV came about."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_model
from tests.unit.inference.test_engine_parity import GREEDY, MAX_LENGTH, Counting, answered, prompts
from verl.inference.async_engine import AsyncEngine
from verl.inference.attention import TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.model_runner import KVCache, ModelRunner
from verl.inference.models.generic import GenericModel
from verl.inference.sequence import Sequence
from verl.models.routing import record_routes, routers
from verl.types.request import Output, Request, SamplingParams

FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def engine_and_model(family: str, num_blocks: int = 80, **options) -> tuple[Engine, torch.nn.Module]:
    """An engine that notes experts, and the same model of transformers."""
    changes = {"num_hidden_layers": 3, **FAMILIES[family]}
    model = GenericModel(tiny_model(family, **changes), MAX_LENGTH)
    kv = KVCache(model, num_blocks, 4)
    kv.record_experts(model)
    runner = ModelRunner(model, TorchAttention(), kv, 8, MAX_LENGTH)
    scheduler = Counting(BlockManager(num_blocks, 4), 8, returns_experts=True, max_model_len=MAX_LENGTH, **options)
    return Engine(scheduler, runner), tiny_model(family, **changes)


def experts_of(model: torch.nn.Module, tokens: list[int]) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for router in routers(model).values():
        router._forward_hooks.clear()
    record_routes(model, found.__setitem__)
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


class Late:
    """The runner of a GPU: a step is launched before the results of the one before are read."""

    steps_ahead = 1

    def __init__(self, runner: ModelRunner) -> None:
        self.launch = runner.launch


class Versions:
    """An engine whose weights change, and the models of transformers with the weights of each version."""

    def __init__(self, steps_ahead: int = 0, num_blocks: int = 80, max_num_batched_tokens: int = 256) -> None:
        self.engine, first = engine_and_model("qwen3_moe", num_blocks, max_num_batched_tokens=max_num_batched_tokens)
        self.weights = self.engine.runner.model.named_weights()
        self.models = [first]
        if steps_ahead:
            self.engine.runner = Late(self.engine.runner)

    def update(self) -> None:
        """The next version, with other routers; the KV of running sequences is computed again."""
        model = copy.deepcopy(self.models[-1])
        torch.manual_seed(len(self.models))
        for router in routers(model).values():
            torch.nn.init.normal_(router.weight, std=0.5)
        for name, weight in model.state_dict().items():
            self.weights[name].copy_(weight)
        self.models.append(model)
        self.engine.preempt_all()
        self.engine.version += 1

    def wanted(self, prompt: list[int], output: Output) -> torch.Tensor:
        """[tokens but the last, 3, k]: of every token as the version chose that sampled the token after it."""
        tokens = [*prompt, *output.token_ids][:-1]
        chosen = {version: experts_of(self.models[version], tokens) for version in set(output.versions)}
        passes = [output.versions[0]] * (len(prompt) - 1) + list(output.versions)
        like = next(iter(chosen[passes[0]].values()))
        unrouted = torch.full_like(like, 255)
        return torch.stack(
            [
                torch.stack([chosen[version].get(layer, unrouted)[place] for place, version in enumerate(passes)])
                for layer in range(3)
            ],
            dim=1,
        )

    def assert_noted(self, prompt: list[int], output: Output) -> None:
        assert torch.equal(torch.from_numpy(output.routed_experts).long(), self.wanted(prompt, output))


def test_tokens_of_before_an_update_keep_the_experts_of_their_version():
    """Aborted, resumed by another engine after an update; and gone on with through an update."""
    versions = Versions()
    asked = [Request(f"r{n}", prompt, GREEDY) for n, prompt in enumerate(prompts())]
    sequences = [Sequence(request, serial) for serial, request in enumerate(asked)]
    versions.engine.add(sequences)
    while min(len(sequence.output.token_ids) for sequence in sequences) < 3:
        versions.engine.step()
    aborted, going_on = sequences[::2], sequences[1::2]
    versions.engine.remove(aborted)
    partial = [sequence.output for sequence in aborted]
    for request, output in zip(asked[::2], partial, strict=True):
        versions.assert_noted(request.prompt_ids, output)
    versions.update()
    resumed = [replace(request, resume_from=output) for request, output in zip(asked[::2], partial, strict=True)]
    outputs = answered(versions.engine, resumed)
    older = newer = 0
    for request, output in [*zip(resumed, outputs, strict=True), *((s.request, s.output) for s in going_on)]:
        assert set(output.versions) == {0, 1}
        versions.assert_noted(request.prompt_ids, output)
        older, newer = older + output.versions.count(0), newer + output.versions.count(1)
    assert older >= 15
    assert newer >= 15


@pytest.mark.parametrize(("seed", "steps_ahead"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_whatever_happens_to_a_sequence_each_token_has_the_experts_that_sampled_it(seed, steps_ahead):
    """Aborts, resumes, updates and sequences that give way to others, in random order; blocks for few at a time."""
    dice = random.Random(seed)
    versions = Versions(steps_ahead=steps_ahead, num_blocks=16, max_num_batched_tokens=13)
    engine, done, serial = versions.engine, [], 0
    sampled = SamplingParams(max_new_tokens=14)
    waiting = [Request(f"{n}", prompts()[n % 3], replace(sampled, key=n), group=f"{n % 3}") for n in range(7)]
    running: list[Sequence] = []
    while waiting or running:
        event = dice.random()
        if waiting and event < 0.3:
            running.append(Sequence(waiting.pop(dice.randrange(len(waiting))), serial := serial + 1))
            engine.add(running[-1:])
        elif running and event < 0.36:
            sequence = running.pop(dice.randrange(len(running)))
            engine.remove([sequence])
            waiting.append(replace(sequence.request, resume_from=pickle.loads(pickle.dumps(sequence.output))))
        elif event < 0.40 and len(versions.models) < 6:
            done += [(s.request, s.output) for s in engine.drain()]
            running = [sequence for sequence in running if not sequence.done]
            versions.update()
        else:
            done += [(s.request, s.output) for s in engine.step()]
            running = [sequence for sequence in running if not sequence.done]
    assert len(done) == 7
    assert any(len(set(output.versions)) > 1 for _, output in done)
    for request, output in done:
        versions.assert_noted(request.prompt_ids, output)


def test_a_resumed_answer_whose_experts_are_not_known_says_so():
    versions = Versions()
    known = answered(versions.engine, [Request("a", prompts()[0], replace(GREEDY, max_new_tokens=4))])[0]
    earlier = Output(known.token_ids, known.log_probs, known.versions)
    (output,) = answered(versions.engine, [Request("b", prompts()[0], GREEDY, resume_from=earlier)])
    count = len(prompts()[0]) + 3
    assert (output.routed_experts[:count] == 255).all()
    assert torch.equal(
        torch.from_numpy(output.routed_experts[count:]).long(), versions.wanted(prompts()[0], output)[count:]
    )


def test_pieces_of_an_answer_have_the_experts_of_their_tokens():
    """What a lost replica had told: together the pieces are the answer."""
    versions = Versions()
    engine = AsyncEngine(versions.engine)
    sequence = Sequence(Request("a", prompts()[0], GREEDY))
    engine._unfinished["a"] = sequence
    versions.engine.add([sequence])
    pieces, told = [], 0
    while not sequence.done:
        for _ in range(3):
            versions.engine.step()
        for piece in engine.tokens_since({"a": told}).values():
            pieces.append(piece.routed_experts)
            told += len(piece.token_ids)
        if told == 3:
            versions.update()
    assert [len(piece) for piece in pieces] == [len(prompts()[0]) + 2, 3, 3, 3]
    assert np.array_equal(np.concatenate(pieces), sequence.output.routed_experts)
    versions.assert_noted(prompts()[0], sequence.output)
