"""A row whose results are not finite fails alone: the other rows of its batch keep their tokens and log-probs."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_model
from verl.inference.async_engine import AsyncEngine
from verl.inference.attention import TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.model_runner import KVCache, ModelRunner
from verl.inference.models.fused import FusedModel
from verl.inference.models.generic import GenericModel
from verl.inference.sampler import SamplingBatch, sample_tokens
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.types.request import (
    MAX_LOGIT_CHANGE,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    Output,
    Request,
    SamplingParams,
)

BROKEN = 77
"""The token whose embedding is not finite."""
VOCABULARY = 264
MAX_LENGTH = 64


def broken_module(value: float) -> Any:
    module = tiny_model()
    with torch.no_grad():
        module.model.embed_tokens.weight[BROKEN] = value
    return module


def make_engine(value: float, fused: bool = False, num_blocks: int = 20) -> Engine:
    module = broken_module(value)
    model: Any = GenericModel(module, MAX_LENGTH)
    if fused:
        model = FusedModel(module.config, MAX_LENGTH, torch.float32, "cpu")
        for name, tensor in model.named_weights().items():
            tensor.copy_(module.state_dict()[name])
    kv = KVCache(model, num_blocks, 4)
    runner = ModelRunner(model, TorchAttention(), kv, 8, MAX_LENGTH)
    return Engine(Scheduler(BlockManager(num_blocks, 4, True), 8, 64, MAX_LENGTH), runner, VOCABULARY)


def run(engine: Engine, requests: list[Request]) -> list[Sequence]:
    sequences = [Sequence(request, serial) for serial, request in enumerate(requests)]
    engine.add(sequences)
    while engine.has_work:
        engine.step()
    return sequences


def requests_of(seed: int, broken: bool) -> list[Request]:
    """Six random rows; two of them contain BROKEN, or another token in its place and end after one token."""
    dice = random.Random(seed)
    requests = []
    for row in range(6):
        prompt = [dice.randrange(100, VOCABULARY) for _ in range(dice.randrange(3, 14))]
        params = SamplingParams(
            key=dice.randrange(2**31),
            temperature=dice.choice([0.0, 0.7, 1.0]),
            top_p=dice.choice([1.0, 0.9]),
            repetition_penalty=dice.choice([1.0, 1.3]),
            max_new_tokens=dice.randrange(4, 20),
            logit_bias=((BROKEN, -100.0),),
        )
        if row in (1, 4):
            prompt[dice.randrange(len(prompt))] = BROKEN if broken else 5
            params = params if broken else replace(params, max_new_tokens=1)
        requests.append(Request(f"r{row}", prompt, params))
    return requests


@pytest.mark.parametrize(
    ("value", "fused"),
    [
        (math.nan, True),
        (math.inf, False),
        pytest.param(math.nan, False, marks=pytest.mark.slow),
        pytest.param(math.inf, True, marks=pytest.mark.slow),
    ],
)
def test_other_rows_of_the_batch_are_bit_identical(value, fused):
    engine, sound = make_engine(value, fused), make_engine(0.1, fused)
    for seed in range(4):
        rows, expected = run(engine, requests_of(seed, True)), run(sound, requests_of(seed, False))
        for number, (row, reference) in enumerate(zip(rows, expected, strict=True)):
            if number in (1, 4):
                assert isinstance(row.error, FloatingPointError)
                assert row.output == Output()
            else:
                assert row.error is None
                assert row.output == reference.output
    assert engine.scheduler.blocks.free_blocks == engine.scheduler.blocks.num_blocks


def test_an_async_engine_raises_for_the_row_alone():
    engine = AsyncEngine(make_engine(math.nan))
    try:
        params = SamplingParams(max_new_tokens=8, logit_bias=((BROKEN, -100.0),))
        good, bad = engine.submit([Request("good", [5, 6], params), Request("bad", [5, BROKEN], params)])
        with pytest.raises(FloatingPointError, match=r"version 0\b.*log-prob nan .*'bad'"):
            bad.result()
        assert len(good.result().token_ids) == 8
        assert len(engine.submit([Request("next", [5, 6], params)])[0].result().token_ids) == 8
    finally:
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_fails_alone(temperature):
    every = frozenset(range(VOCABULARY))
    stuck = SamplingParams(temperature=temperature, stop_token_ids=every, min_new_tokens=2, max_new_tokens=4)
    free = SamplingParams(temperature=temperature, max_new_tokens=4)
    bad, good = run(make_engine(0.1), [Request("bad", [5], stuck), Request("good", [5], free)])
    with pytest.raises(ValueError, match=r"'bad': .*position 1\b.*min_new_tokens"):
        raise bad.error
    assert good.error is None
    assert len(good.output.token_ids) == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_ids": [5, 264]}, "prompt_ids .*264;.*263"),
        ({"prompt_ids": [-1]}, "prompt_ids .*-1;"),
        ({"params": SamplingParams(logit_bias=((300, 1.0),))}, "logit_bias .*300;"),
        ({"params": SamplingParams(stop_token_ids=frozenset([999]))}, "stop_token_ids .*999;"),
        ({"params": SamplingParams(eos_token_ids=frozenset([999]), min_new_tokens=1)}, "eos_token_ids .*999;"),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_rejected(fields, words):
    with pytest.raises(ValueError, match=words):
        make_engine(0.1).check(Request("r", **{"prompt_ids": [5], "params": SamplingParams(), **fields}))


EXTREME = [0.0, -0.0, 5e-324, 1e-310, 1e-45, 1e-40, 1e-38, 1e-20, 1e-5, 1e-3, 0.5, 1.0, 2.0, 1e3, 1e5, 1e9, 1e20]
EXTREME += [3.4e38, 1e39, 1e308, math.inf, math.nan, 10**400]
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def accepted(dice: random.Random) -> SamplingParams | None:
    """Random parameters from EXTREME, or None where they are rejected. Any other exception is a defect."""
    fields: dict[str, Any] = {name: dice.choice(EXTREME) for name in dice.sample(NUMBERS, 3)}
    if dice.random() < 0.5:
        fields["logit_bias"] = ((dice.randrange(8), dice.choice([1, -1]) * dice.choice(EXTREME)),)
    fields["top_k"] = dice.choice([-1, 0, 1, 3, 2**63 - 1, 2**63, 10**400])
    try:
        return SamplingParams(key=dice.randrange(2**31), **fields)
    except ValueError:
        return None


def test_parameters_that_are_accepted_give_finite_log_probs():
    """Also at the bounds, for logits of every dtype that models compute in."""
    dice = random.Random(0)
    found = [params for params in (accepted(dice) for _ in range(4000)) if params is not None]
    least = (MIN_TEMPERATURE, MIN_REPETITION_PENALTY)
    most = (MAX_TEMPERATURE, MAX_REPETITION_PENALTY)
    for (temperature, penalty), bias in itertools.product((least, most), (-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE)):
        shaped = {"repetition_penalty": penalty, "logit_bias": ((3, bias),), "frequency_penalty": bias}
        found.append(SamplingParams(temperature=temperature, **shaped))
    assert len(found) > 50
    batch = SamplingBatch.from_params(found, "cpu")
    torch.manual_seed(0)
    for dtype, scale in ((torch.float32, 30.0), (torch.float16, 6e4), (torch.bfloat16, 1e20)):
        logits = (torch.randn(len(found), 8).clamp(-1, 1) * scale).to(dtype)

        def shape(raw: torch.Tensor, block: slice) -> torch.Tensor:
            """Penalties and biases as the engine's sampler applies them, for tokens that occurred 1,000 times."""
            shaped = raw.clone()
            for row, params in enumerate(found[block]):
                values = shaped[row]
                penalty = params.repetition_penalty
                values = torch.where(values > 0, values / penalty, values * penalty)
                shaped[row] = values - 1000 * params.frequency_penalty - params.presence_penalty
                for token, bias in params.logit_bias:
                    shaped[row, token] += bias
            return shaped

        sampled = sample_tokens(logits, batch, torch.zeros(len(found), dtype=torch.int64), processor=shape)
        assert torch.stack(sampled[1:]).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 1e-40}, "temperature: 1e-40 .*1e-05 to 100000"),
        ({"temperature": 1e308}, r"temperature: 1e\+308 .*1e-05 to 100000"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty: 1e-40 .*0.001 to 1000"),
        ({"presence_penalty": math.inf}, r"presence_penalty: inf .*-1e\+09 to 1e\+09"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty: nan .*-1e\+09 to 1e\+09"),
        ({"logit_bias": ((3, -math.inf),)}, r"logit_bias of token 3: -inf .*-1e\+09 to 1e\+09"),
        ({"top_k": 2**63}, f"top_k: {2**63} .*-1"),
    ],
)
def test_rejected_parameters_name_their_bounds(fields, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)
