"""Sampled tokens follow the distribution they are drawn from, and log-probs are those of training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.truncation import drawn_probs
from verl.inference import sampler
from verl.inference.sampler import SamplingBatch, sample_tokens
from verl.inference.step_plan import banned_tokens
from verl.types.request import SamplingParams
from verl.utils.counter_noise import sample_key

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0])


def draw(count: int, logits: torch.Tensor = LOGITS, **params):
    """`count` independent samples of one distribution."""
    batch = SamplingBatch.from_params(
        [SamplingParams(key=sample_key(0, 0, "u", i), **params) for i in range(count)], CPU
    )
    return sample_tokens(logits.expand(count, -1), batch, torch.full((count,), 11))[:2]


def banned(params: list[SamplingParams], generated: int) -> list[tuple[int, int]]:
    return banned_tokens((row, p, generated) for row, p in enumerate(params))


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert (counts[probs == 0] == 0).all(), "a token outside of the allowed set was drawn"
    allowed = probs > 0
    expected = probs[allowed].double() * len(tokens)
    return float(((counts[allowed] - expected) ** 2 / expected).sum())


# The 99.99 % quantile of chi-square with 6 degrees of freedom; fewer degrees lie below it.
LIMIT = 27.9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_softmax_at_the_temperature(temperature):
    tokens, log_probs = draw(20_000, temperature=temperature)
    expected = torch.log_softmax(LOGITS / temperature, dim=-1)
    assert chi_square(tokens, expected.exp()) < LIMIT
    torch.testing.assert_close(log_probs, expected[tokens])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 6]),
        ({"top_k": 0}, range(7)),
        ({"top_k": 100}, range(7)),
        ({"top_p": 0.01}, [0]),
        ({"top_p": 0.7}, [0, 1, 6]),
        ({"min_p": 0.3}, [0, 1, 6]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),
        ({"top_k": 4, "min_p": 0.3}, [0, 1, 6]),
    ],
)
def test_truncation_draws_only_from_the_allowed_set_at_its_renormalised_rates(params, kept):
    tokens, log_probs = draw(10_000, **params)
    probs = torch.zeros(7)
    probs[list(kept)] = LOGITS.softmax(dim=-1)[list(kept)]
    assert chi_square(tokens, probs / probs.sum()) < LIMIT
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(dim=-1)[tokens], msg="not of the truncated distribution")


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(draw(2000, logits, top_p=0.5)[0].tolist()) == {0}
    assert set(draw(2000, logits, top_p=0.51)[0].tolist()) == {0, 1}
    assert set(draw(2000, logits, top_p=0.81)[0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("params", [{"do_sample": False}, {"temperature": 0.0}, {"do_sample": False, "top_k": 5}])
def test_greedy_takes_the_likeliest(params):
    tokens, log_probs = draw(50, **params)
    assert tokens.tolist() == [0] * 50
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(dim=-1)[tokens])


def test_ends_are_not_drawn_before_the_minimum_length():
    params = SamplingParams(
        eos_token_ids=frozenset([0]), stop_token_ids=frozenset([1]), min_new_tokens=3, max_new_tokens=9
    )
    assert banned_tokens([(0, params, 2), (1, params, 3)]) == [(0, 0), (0, 1)]
    keys = [SamplingParams(key=i, min_new_tokens=1, eos_token_ids=frozenset([0])) for i in range(3000)]
    batch = SamplingBatch.from_params(keys, CPU)
    tokens, log_probs, _, drawn = sample_tokens(
        LOGITS.expand(3000, -1), batch, torch.zeros(3000).long(), banned(keys, 0)
    )
    assert 0 not in tokens
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(dim=-1)[tokens])
    torch.testing.assert_close(drawn, LOGITS[1:].log_softmax(dim=-1)[tokens - 1])


def test_log_probs_of_the_full_the_raw_and_the_drawn_distribution():
    """Probabilities .5 .3 .2 at temperature 1; at 0.5 they are squared: .25 .09 .04 over .38; top-k 2 leaves two."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(64, 3)
    params = [SamplingParams(key=i, temperature=0.5, top_k=2) for i in range(63)] + [SamplingParams(do_sample=False)]
    tokens, log_probs, raw, drawn = sample_tokens(logits, SamplingBatch.from_params(params, CPU), torch.arange(64))
    assert set(tokens.tolist()) == {0, 1}
    full = torch.tensor([0.25, 0.09]) / 0.38
    torch.testing.assert_close(log_probs[:-1].exp(), full[tokens[:-1]])
    torch.testing.assert_close(raw.exp(), torch.tensor([0.5, 0.3])[tokens])
    torch.testing.assert_close(drawn[:-1].exp(), (torch.tensor([0.25, 0.09]) / 0.34)[tokens[:-1]])
    assert tokens[-1] == 0
    assert drawn[-1] == 0


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([-1, 1, 3, 6]),
    st.sampled_from([0.15, 0.5, 0.83, 1.0]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_drawn_log_probs_are_those_of_what_truncation_leaves_and_add_up_to_one(seed, temperature, top_k, top_p, min_p):
    logits = 1.5 * torch.rand(6, generator=torch.Generator().manual_seed(seed))
    shape = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = [SamplingParams(key=sample_key(0, 0, "u", i), **shape) for i in range(1500)]
    found = sample_tokens(logits.expand(1500, -1), SamplingBatch.from_params(params, CPU), torch.zeros(1500).long())
    expected = drawn_probs((logits.double() / temperature).tolist(), top_k, top_p, min_p)
    seen = dict(zip(found.tokens.tolist(), found.drawn_log_probs.exp().tolist(), strict=True))
    assert seen == pytest.approx(expected, abs=1e-5), "every token that is left was drawn, and none that is not"
    assert sum(seen.values()) == pytest.approx(1.0, abs=1e-5)


params_strategy = st.builds(
    SamplingParams,
    key=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 2, 5]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    do_sample=st.booleans(),
    min_new_tokens=st.sampled_from([0, 3]),
    eos_token_ids=st.just(frozenset([2])),
)


@settings(max_examples=40)
@given(st.lists(params_strategy, min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_rows_sample_does_not_depend_on_the_batch_it_is_drawn_in(params, seed):
    rows = len(params)
    logits = torch.randn(rows, 11, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(rows)
    batch = SamplingBatch.from_params(params, CPU)
    whole = sample_tokens(logits, batch, positions, banned(params, 1))
    for row in range(rows):
        alone = SamplingBatch.from_params(params[row : row + 1], CPU)
        here = slice(row, row + 1)
        single = sample_tokens(logits[here], alone, positions[here], banned(params[here], 1))
        for found, expected in zip(single, whole, strict=True):
            torch.testing.assert_close(found, expected[here])


def test_working_in_blocks_changes_nothing(monkeypatch):
    params = [SamplingParams(key=i, min_new_tokens=1, stop_token_ids=frozenset([i])) for i in range(7)]
    batch = SamplingBatch.from_params(params, CPU)
    logits = torch.randn(7, 9)
    whole = sample_tokens(logits, batch, torch.arange(7), banned(params, 0))
    monkeypatch.setattr(sampler, "BLOCK_ELEMENTS", 20)
    in_blocks = sample_tokens(logits, batch, torch.arange(7), banned(params, 0))
    assert all(torch.equal(one, other) for one, other in zip(whole, in_blocks, strict=True))


def test_log_probs_of_half_precision_logits_are_computed_in_float32():
    logits = (torch.randn(1, 50_000) * 3).bfloat16()
    batch = SamplingBatch.from_params([SamplingParams(temperature=0.7)], CPU)
    token, log_prob, *_ = sample_tokens(logits, batch, torch.tensor([0]))
    exact = (logits.double() / 0.7).log_softmax(dim=-1)[0, token]
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2.0}, {"max_new_tokens": 0}]
    + [{"min_new_tokens": 5, "max_new_tokens": 4}],
)
def test_impossible_parameters_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
