"""What an engine samples, what it says of it, and where answers end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engines.engines import MODELS
from tests.support.engine_cases import DEVICE
from tests.support.tiny import tiny_model, tiny_tokenizer
from verl.models.routing import record_routes
from verl.types.request import Output, Request, SamplingParams

PROMPTS = [[10, 20, 30, 40], [9] * 11, list(range(60, 100))]
GREEDY = SamplingParams(max_new_tokens=20, do_sample=False)
SAMPLED = SamplingParams(max_new_tokens=20, key=7)


def ask(engine: Any, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **fields: Any) -> list[Output]:
    requests = [Request(f"r{i}", prompt, params, **fields) for i, prompt in enumerate(prompts)]
    return [future.result() for future in engine.submit(requests)]


def logits_of(model: Any, prompt: list[int], output: Output) -> torch.Tensor:
    """[tokens, vocab]: what each generated token was drawn from."""
    with torch.no_grad():
        return model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]


def log_probs_of(logits: torch.Tensor, output: Output) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))[:, 0]


@pytest.fixture(scope="module")
def model() -> Any:
    """transformers', which all are held to."""
    return tiny_model(**MODELS["plain"])


def test_greedy_tokens_are_transformers(start: Callable[..., Any], model: Any) -> None:
    for prompt, output in zip(PROMPTS, ask(start(), GREEDY), strict=True):
        logits = logits_of(model, prompt, output)
        assert output.token_ids == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(output.log_probs), log_probs_of(logits, output), atol=1e-4, rtol=0)
        assert (output.finish_reason, len(output.token_ids)) == ("length", 20)
        assert set(output.sampled_log_probs) == {0.0}, "a greedy token was certain"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.4])
def test_log_probs_are_those_of_the_policy_at_the_temperature(
    start: Callable[..., Any], model: Any, temperature: float
) -> None:
    for prompt, output in zip(PROMPTS, ask(start(), replace(SAMPLED, temperature=temperature)), strict=True):
        expected = log_probs_of(logits_of(model, prompt, output) / temperature, output)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(output.sampled_log_probs), expected, atol=1e-4, rtol=0)


def test_truncated_log_probs_are_those_drawn_from_and_those_of_the_policy_or_unknown(
    start: Callable[..., Any], model: Any
) -> None:
    params = replace(SAMPLED, top_k=5)
    for prompt, output in zip(PROMPTS, ask(start(), params), strict=True):
        logits = logits_of(model, prompt, output)
        kept = logits.masked_fill(logits < logits.topk(5).values[:, -1:], -math.inf)
        assert log_probs_of(kept, output).isfinite().all(), "only the likeliest five are drawn"
        found = {"drawn": output.sampled_log_probs, "policy": output.log_probs}
        known = {name: values for name, values in found.items() if not math.isnan(values[0])}
        assert known
        for name, values in known.items():
            expected = log_probs_of(kept if name == "drawn" else logits, output)
            torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def test_samples_follow_the_distribution(start: Callable[..., Any], model: Any) -> None:
    params = [replace(SAMPLED, key=key, max_new_tokens=1, temperature=0.5) for key in range(400)]
    requests = [Request(f"r{i}", PROMPTS[0], asked) for i, asked in enumerate(params)]
    drawn = [future.result().token_ids[0] for future in start().submit(requests)]
    with torch.no_grad():
        probs = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.5).softmax(-1)
    likely = set(probs.topk(60).indices.tolist())
    expected = float(probs[sorted(likely)].sum())
    found = sum(token in likely for token in drawn) / len(drawn)
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / len(drawn))


@pytest.mark.needs("seeds")
def test_a_seed_gives_its_tokens_again_and_another_gives_others(start: Callable[..., Any]) -> None:
    engine = start()
    first, again = ask(engine, SAMPLED), ask(engine, SAMPLED)
    other = ask(engine, replace(SAMPLED, key=8))
    assert [output.token_ids for output in first] == [output.token_ids for output in again]
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))


def test_n_answers_of_one_prompt_differ(start: Callable[..., Any]) -> None:
    requests = [Request(f"r{i}", PROMPTS[2], replace(SAMPLED, key=i), group="g") for i in range(8)]
    answers = [future.result().token_ids for future in start().submit(requests)]
    assert len({tuple(tokens) for tokens in answers}) == 8


def test_a_stop_token_ends_an_answer_and_is_its_last_token(start: Callable[..., Any]) -> None:
    engine = start()
    whole = ask(engine, GREEDY)[0].token_ids
    stop = next(token for token in whole if token != whole[0])
    for fields in ({"stop_token_ids": frozenset([stop])}, {"eos_token_ids": frozenset([stop])}):
        (output,) = ask(engine, replace(GREEDY, **fields), PROMPTS[:1])
        assert output.token_ids == whole[: whole.index(stop) + 1]
        assert output.finish_reason == "stop"
    (ignored,) = ask(engine, replace(GREEDY, eos_token_ids=frozenset([stop]), ignore_eos=True), PROMPTS[:1])
    assert ignored.token_ids == whole


def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(start: Callable[..., Any]) -> None:
    engine, tokenizer = start(), tiny_tokenizer()
    for first in range(60):
        prompt = [first, 20, 30, 40]
        (whole,) = ask(engine, GREEDY, [prompt])
        text = tokenizer.decode(whole.token_ids[5:7])
        before = tokenizer.decode(whole.token_ids[:5])
        if text and "\ufffd" not in text and tokenizer.decode(whole.token_ids).find(text) == len(before):
            break
    else:
        pytest.fail("no prompt has an answer to stop")
    (output,) = ask(engine, replace(GREEDY, stop=(text,)), [prompt])
    assert output.token_ids == whole.token_ids[:7]
    assert output.finish_reason == "stop"


def test_no_answer_ends_before_its_shortest_length(start: Callable[..., Any], model: Any) -> None:
    engine = start()
    ends = frozenset(range(0, 264, 2))
    free = ask(engine, replace(SAMPLED, eos_token_ids=ends))
    assert min(len(output.token_ids) for output in free) < 6, "they would end early"
    for prompt, output in zip(
        PROMPTS, ask(engine, replace(SAMPLED, eos_token_ids=ends, min_new_tokens=6)), strict=True
    ):
        assert len(output.token_ids) >= 6
        assert not ends.intersection(output.token_ids[:5])
        policy, expected = torch.tensor(output.log_probs), log_probs_of(logits_of(model, prompt, output), output)
        torch.testing.assert_close(
            policy, torch.where(policy.isnan(), policy, expected), atol=1e-4, rtol=0, equal_nan=True
        )
        assert not policy[6:].isnan().any()


@pytest.mark.needs("details")
def test_penalties_and_biases_change_what_is_drawn(start: Callable[..., Any]) -> None:
    engine = start()
    plain = ask(engine, GREEDY)[0].token_ids
    biased = ask(engine, replace(GREEDY, logit_bias=((77, 100.0),)), PROMPTS[:1])[0]
    assert set(biased.token_ids) == {77}
    repeated = next((token for token in plain if plain.count(token) > 1), None)
    once = ask(engine, replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0), PROMPTS[:1])[0].token_ids
    assert repeated is None or once.count(repeated) < plain.count(repeated)


@pytest.mark.needs("details")
def test_likelier_tokens_and_the_prompts_log_probs_are_told(start: Callable[..., Any], model: Any) -> None:
    (output,) = ask(start(), replace(GREEDY, top_log_probs=3, prompt_log_probs=True), PROMPTS[2:])
    prompt = PROMPTS[2]
    best = logits_of(model, prompt, output).log_softmax(-1).topk(3)
    assert [[token for token, _ in top] for top in output.top_log_probs] == best.indices.tolist()
    found = torch.tensor([[value for _, value in top] for top in output.top_log_probs])
    torch.testing.assert_close(found, best.values, atol=1e-4, rtol=0)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    expected = log_probs_of(logits, Output(prompt[1:]))
    torch.testing.assert_close(torch.tensor(output.prompt_log_probs), expected, atol=1e-4, rtol=0)
    assert len(output.prompt_top_log_probs) == len(prompt) - 1


@pytest.mark.needs("experts")
def test_experts_are_transformers_or_it_is_said_why_the_engine_cannot_say_them(
    start: Callable[..., Any], engine_name: str
) -> None:
    if engine_name == "vllm" and DEVICE == "cpu":  # its runner there has no way to
        with pytest.raises(ValueError, match=r"(?s)return_routed_experts: vLLM .*\)\. .*rollout\.name=native"):
            start("experts", return_routed_experts=True)
        return
    engine = start("experts", return_routed_experts=True)
    model, seen = tiny_model(**MODELS["experts"]), {}
    record_routes(model, seen.__setitem__)
    for prompt, output in zip(PROMPTS, ask(engine, GREEDY), strict=True):
        logits_of(model, prompt, output)
        wanted = torch.stack([seen[layer] for layer in sorted(seen)], dim=1)[:-1]
        found = torch.from_numpy(output.routed_experts).long()
        assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)


def test_an_impossible_request_is_refused_by_name(start: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"request 'r0': .*max_model_len"):
        ask(start(), GREEDY, [[5] * 2000])


@pytest.mark.needs("arguments")
def test_an_argument_that_the_engine_does_not_know_is_refused(start: Callable[..., Any], engine_name: str) -> None:
    with pytest.raises(ValueError, match=rf"engine_kwargs\.{engine_name}.*no_such_argument"):
        start(engine_kwargs={engine_name: {"no_such_argument": 1}})
