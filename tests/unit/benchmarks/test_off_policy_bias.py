"""Stale answers of mixed versions, all of them counted: which corrections give the on-policy gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from off_policy_bias import FORMS, Toy, measured, token_versions

VERSIONS = 8
DOCS = Path(__file__).parents[3] / "docs" / "asynchronous.md"


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.make(seed=1, words=3, tokens=4, updates=VERSIONS, rate=2.0)


def bias(toy: Toy, form: str, drawn: list[int]) -> float:
    wanted, _ = toy.on_policy(VERSIONS)
    found, _ = toy.off_policy(VERSIONS, drawn, FORMS[form])
    return float((found - wanted).norm() / wanted.norm())


def test_the_on_policy_gradient_is_that_of_the_expected_advantage(toy):
    logits = toy.versions[0].clone().requires_grad_()
    expected = (toy.log_probs(logits).sum(-1).exp() * toy.advantages).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(toy.on_policy(0)[0], gradient)


@pytest.mark.parametrize("drawn", [[0, 0, 0, 0], token_versions(VERSIONS, VERSIONS, 4), [3, 0, 8, 1]])
def test_untruncated_sequence_weights_give_the_on_policy_gradient_whatever_versions_drew_the_tokens(toy, drawn):
    assert bias(toy, "rollout_is=sequence, not truncated", drawn) < 1e-12
    others = [name for name in FORMS if name != "rollout_is=sequence, not truncated"]
    assert min(bias(toy, name, drawn) for name in others) > 1e-3, "the others are biased: the table says by how much"


def test_every_form_is_exact_on_fresh_answers(toy):
    assert max(bias(toy, name, [VERSIONS] * 4) for name in FORMS) < 1e-12


def test_token_weights_are_nearer_than_none(toy):
    drawn = token_versions(VERSIONS, VERSIONS, 4)
    assert bias(toy, "rollout_is=token, not truncated", drawn) < bias(toy, "no weights", drawn)


def test_the_docs_have_the_biases_that_the_benchmark_finds():
    """At staleness 2 and 8, with its defaults."""
    cells = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    told = {row[0]: (row[2], row[4], row[5]) for row in cells if row[0] in FORMS}
    toys = {staleness: [Toy.make(seed, 3, 6, staleness, 2.0) for seed in range(8)] for staleness in (2, 8)}
    found = {
        name: (f"{measured(form, 2, toys[2])[0]:.1%}", *("{:.1%} {:.2f}".format(*measured(form, 8, toys[8])).split()))
        for name, form in FORMS.items()
    }
    assert {name: tuple(cell.replace(" %", "%") for cell in row) for name, row in told.items()} == found
