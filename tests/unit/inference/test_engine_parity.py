"""The whole engine against transformers: the same greedy tokens and log-probs, however the work is cut and shared."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_model
from verl.inference.attention import TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.model_runner import KVCache, ModelRunner
from verl.inference.models.fused import FusedModel
from verl.inference.models.generic import GenericModel
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.inference.step_plan import StepPlan
from verl.types.request import Output, Request, SamplingParams

MAX_LENGTH = 64
NEW = 12
GREEDY = SamplingParams(do_sample=False, max_new_tokens=NEW)
LENGTHS = (17, 1, 8, 26, 5)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-fused": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-fused": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-fused": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral-fused": ("mistral", {"sliding_window": MAX_LENGTH}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 6}),
}


@dataclass
class Case:
    """A model, and what transformers makes of it."""

    module: Any
    model: FusedModel | GenericModel
    answers: list[list[int]]

    def log_probs(self, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logits = self.module(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return (logits.double() / temperature).log_softmax(-1).gather(-1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


def prompts() -> list[list[int]]:
    dice = random.Random(2)
    return [[dice.randrange(5, 264) for _ in range(length)] for length in LENGTHS]


_MADE: dict[str, Case] = {}


def case_of(name: str) -> Case:
    if name not in _MADE:
        family, changes = CASES[name]
        module = tiny_model(family, **changes)
        answers = [
            module.generate(torch.tensor([p]), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
            for p in prompts()
        ]
        if name.endswith("-fused"):
            model: Any = FusedModel(module.config, MAX_LENGTH, torch.float32, "cpu")
            for weight, tensor in model.named_weights().items():
                tensor.copy_(module.state_dict()[weight])
        else:
            model = GenericModel(tiny_model(family, **changes), MAX_LENGTH)
        _MADE[name] = Case(module, model, [a[0, len(p) :].tolist() for a, p in zip(answers, prompts(), strict=True)])
    return _MADE[name]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


class Counting(Scheduler):
    """Says how many prompt tokens were computed."""

    prefilled = 0

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        self.prefilled += sum(len(piece.token_ids) for piece in plan.prefills) if plan else 0
        return plan


def make_engine(
    case: Case,
    num_blocks: int = 80,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    chunked_prefill: bool = True,
    prefix_caching: bool = False,
) -> Engine:
    kv = KVCache(case.model, num_blocks, block_size)
    runner = ModelRunner(case.model, TorchAttention(), kv, max_num_seqs, MAX_LENGTH)
    blocks = BlockManager(num_blocks, block_size, prefix_caching)
    return Engine(Counting(blocks, max_num_seqs, max_num_batched_tokens, MAX_LENGTH, chunked_prefill), runner)


def answered(engine: Engine, requests: list[Request]) -> list[Output]:
    sequences = [Sequence(request, serial) for serial, request in enumerate(requests)]
    engine.add(sequences)
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    assert engine.scheduler.blocks.free_blocks == engine.scheduler.blocks.num_blocks, "every block was given back"
    return [sequence.output for sequence in sequences]


def questions(params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(f"r{i}", prompt, params, group=f"r{i}") for i, prompt in enumerate(prompts())]


def assert_equal_to_transformers(case: Case, outputs: list[Output]) -> None:
    for prompt, answer, output in zip(prompts(), case.answers, outputs, strict=True):
        assert output.token_ids == answer
        found = torch.tensor([output.log_probs, output.raw_log_probs], dtype=torch.float64)
        assert (found - case.log_probs(prompt, answer)).abs().max() < 1e-5


def test_greedy_answers_of_ragged_prompts(case):
    assert_equal_to_transformers(case, answered(make_engine(case), questions()))


def test_with_preemption_and_chunks(case):
    engine = make_engine(case, num_blocks=14, max_num_batched_tokens=7)
    outputs = answered(engine, questions())
    assert_equal_to_transformers(case, outputs)
    assert sum(output.preemptions for output in outputs) > 0


def test_with_prefix_cache_hits(case):
    engine = make_engine(case, prefix_caching=True)
    assert_equal_to_transformers(case, answered(engine, questions()))
    first = engine.scheduler.prefilled
    assert_equal_to_transformers(case, answered(engine, questions()))
    assert engine.scheduler.prefilled - first < first / 2
    # The next turn: the first answer and some more tokens belong to the prompt.
    turn = prompts()[0] + case.answers[0] + [7, 8, 9]
    before = engine.scheduler.prefilled
    output = answered(engine, [Request("turn", turn, GREEDY)])[0]
    assert engine.scheduler.prefilled - before < len(turn) - len(prompts()[0])
    assert (torch.tensor(output.log_probs) - case.log_probs(turn, output.token_ids)).abs().max() < 1e-5


def test_samples_of_one_prompt_share_its_prefill(case):
    engine = make_engine(case)
    sampled = SamplingParams(temperature=0.7, max_new_tokens=NEW)
    requests = [
        Request(f"{i}/{n}", prompt, replace(sampled, key=100 * i + n), group=str(i))
        for i, prompt in enumerate(prompts()[:3])
        for n in range(2)
    ]
    outputs = answered(engine, requests)
    assert engine.scheduler.prefilled == sum(LENGTHS[:3])
    assert outputs[0].token_ids != outputs[1].token_ids
    for request, output in zip(requests, outputs, strict=True):
        expected = case.log_probs(request.prompt_ids, output.token_ids, temperature=0.7)
        assert (torch.tensor(output.log_probs) - expected).abs().max() < 1e-5
    alone = [answered(make_engine(case), [replace(request, group="")])[0].token_ids for request in requests[:2]]
    assert alone == [output.token_ids for output in outputs[:2]]


@pytest.mark.parametrize("name", ["qwen2-fused", "gemma2"])
@pytest.mark.parametrize(
    "budget", [2, 7, 26, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (1, 3, 4, 5, 6, 9, 16, 27))]
)
def test_every_chunk_size(name, budget):
    case = case_of(name)
    assert_equal_to_transformers(case, answered(make_engine(case, max_num_batched_tokens=budget), questions()))


@pytest.mark.parametrize("name", ["qwen2-fused", "gemma2"])
@pytest.mark.parametrize("budget", [5, 30, 256])
def test_without_chunked_prefill(name, budget):
    engine = make_engine(case_of(name), max_num_batched_tokens=budget, chunked_prefill=False)
    assert_equal_to_transformers(case_of(name), answered(engine, questions()))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_every_block_size(block_size):
    case = case_of("llama-fused")
    engine = make_engine(case, num_blocks=200 // block_size + 5, block_size=block_size, prefix_caching=True)
    assert_equal_to_transformers(case, answered(engine, questions()))
    assert_equal_to_transformers(case, answered(engine, questions()))


TIGHT = {"num_blocks": 14, "max_num_batched_tokens": 7}
"""Prompts come in pieces, and sequences are sent back and computed again."""


def shaped_answer(case: Case, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """Greedy tokens under penalties and biases, by the formula; and their log-probs in the model's own distribution."""
    tokens, log_probs = list(prompt), []
    for _ in range(params.max_new_tokens):
        with torch.no_grad():
            logits = case.module(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        shaped = logits.clone()
        for token in set(tokens):
            shaped[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        for token in set(tokens[len(prompt) :]):
            times = tokens[len(prompt) :].count(token)
            shaped[token] -= params.frequency_penalty * times + params.presence_penalty
        for token, bias in params.logit_bias:
            shaped[token] += bias
        tokens.append(int(shaped.argmax()))
        log_probs.append(logits.log_softmax(-1)[tokens[-1]].item())
    return tokens[len(prompt) :], log_probs


LIMITS = [
    TIGHT,
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"prefix_caching": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_penalties_and_biases_follow_their_formula_and_touch_nobody_else(limits):
    case = case_of("qwen2-fused")
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.8},
        {},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logit_bias": ((case.answers[3][0], -100.0), (77, 0.05))},
        {"repetition_penalty": 0.6, "frequency_penalty": -0.1, "logit_bias": ((5, 0.1),)},
    ]
    requests = [
        replace(request, params=replace(GREEDY, **kind)) for request, kind in zip(questions(), kinds, strict=True)
    ]
    for output, request in zip(answered(make_engine(case, **limits), requests), requests, strict=True):
        expected, log_probs = shaped_answer(case, list(request.prompt_ids), request.params)
        assert output.token_ids == expected
        assert output.log_probs == pytest.approx(log_probs, abs=1e-5)
    plain, *others = [answered(make_engine(case), questions())[i].token_ids for i in (1, 0, 2, 3, 4)]
    assert plain == case.answers[1]
    changed = [shaped_answer(case, list(r.prompt_ids), r.params)[0] for r in (requests[i] for i in (0, 2, 3, 4))]
    assert all(one != other for one, other in zip(others, changed, strict=True)), "each kind changes its answer"


def test_what_is_drawn_under_penalties_has_the_log_probs_of_the_penalised_distribution():
    case = case_of("qwen2-fused")
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, logit_bias=((9, 3.0),), key=4, max_new_tokens=NEW)
    prompt = prompts()[0]
    output = answered(make_engine(case), [Request("r", prompt, params)])[0]
    assert (torch.tensor(output.log_probs) - case.log_probs(prompt, output.token_ids, 0.5)).abs().max() < 1e-5
    tokens = list(prompt)
    for token, drawn in zip(output.token_ids, output.sampled_log_probs, strict=True):
        with torch.no_grad():
            logits = case.module(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        known = torch.tensor(sorted(set(tokens)))
        logits[known] = torch.where(logits[known] > 0, logits[known] / 2, logits[known] * 2)
        logits[9] += 3
        assert (logits / 0.5).log_softmax(-1)[token].item() == pytest.approx(drawn, abs=1e-5)
        tokens.append(token)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["qwen2-fused", "gemma2"])
def test_likeliest_tokens_and_log_probs_of_prompts_are_those_of_transformers(name, limits):
    case = case_of(name)
    engine = make_engine(case, **limits)
    asked = replace(GREEDY, top_log_probs=3, prompt_log_probs=True)
    requests = [Request(f"{i}/{n}", p, asked, group=str(i)) for i, p in enumerate(prompts()) for n in range(2)]
    plain = [replace(request, id=f"plain {request.id}", params=GREEDY) for request in requests]
    for _ in range(2):  # the second time, the prefix cache knows them all
        outputs = answered(engine, plain[:3] + requests)
        assert not any(output.top_log_probs or output.prompt_log_probs for output in outputs[:3])
        for request, output in zip(requests, outputs[3:], strict=True):
            prompt = list(request.prompt_ids)
            with torch.no_grad():
                logits = case.module(torch.tensor([prompt + output.token_ids]), use_cache=False).logits[0, :-1]
            best, ids = logits.double().log_softmax(-1).topk(3)
            tops = output.prompt_top_log_probs + output.top_log_probs
            assert [[token for token, _ in top] for top in tops] == ids.tolist()
            assert (torch.tensor([[value for _, value in top] for top in tops]) - best).abs().max() < 1e-5
            expected = case.log_probs(prompt[:1], prompt[1:])
            assert output.prompt_log_probs == pytest.approx(expected.tolist(), abs=1e-5)
