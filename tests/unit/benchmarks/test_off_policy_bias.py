"""Stale responses of mixed versions: which corrections give the on-policy gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from off_policy_bias import CORRECTIONS, TabularPolicy, bias_and_noise, token_versions

VERSIONS = 8
DOCS = Path(__file__).parents[3] / "docs/concepts/policy_and_weights.md"


@pytest.fixture(scope="module")
def policy() -> TabularPolicy:
    return TabularPolicy.random(seed=1, vocab=3, tokens=4, updates=VERSIONS, rate=2.0)


def bias(policy: TabularPolicy, correction: str, versions: list[int]) -> float:
    expected, _ = policy.on_policy(VERSIONS)
    gradient, _ = policy.off_policy(VERSIONS, versions, CORRECTIONS[correction])
    return float((gradient - expected).norm() / expected.norm())


def test_the_on_policy_gradient_is_that_of_the_expected_advantage(policy):
    logits = policy.versions[0].clone().requires_grad_()
    expected = (policy.log_probs(logits).sum(-1).exp() * policy.advantages).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(policy.on_policy(0)[0], gradient)


@pytest.mark.parametrize("versions", [[0, 0, 0, 0], token_versions(VERSIONS, VERSIONS, 4), [3, 0, 8, 1]])
def test_untruncated_sequence_weights_give_the_on_policy_gradient_for_any_token_versions(policy, versions):
    assert bias(policy, "rollout_is=sequence, not truncated", versions) < 1e-12
    others = [name for name in CORRECTIONS if name != "rollout_is=sequence, not truncated"]
    assert min(bias(policy, name, versions) for name in others) > 1e-3, "the others are biased"


def test_every_correction_is_exact_on_policy(policy):
    assert max(bias(policy, name, [VERSIONS] * 4) for name in CORRECTIONS) < 1e-12


def test_token_weights_reduce_the_bias(policy):
    versions = token_versions(VERSIONS, VERSIONS, 4)
    assert bias(policy, "rollout_is=token, not truncated", versions) < bias(policy, "no weights", versions)


def test_the_docs_contain_the_measured_biases():
    """At staleness 2 and 8, with its defaults."""
    cells = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    documented = {row[0]: (row[2], row[4], row[5]) for row in cells if row[0] in CORRECTIONS}
    policies = {n: [TabularPolicy.random(seed, 3, 6, n, 2.0) for seed in range(8)] for n in (2, 8)}
    measured = {}
    for name, correction in CORRECTIONS.items():
        (bias_2, _), (bias_8, noise_8) = (bias_and_noise(correction, n, policies[n]) for n in (2, 8))
        measured[name] = (f"{bias_2:.1%}", f"{bias_8:.1%}", f"{noise_8:.2f}")
    assert {name: tuple(cell.replace(" %", "%") for cell in row) for name, row in documented.items()} == measured
