"""Exact bias of the policy gradient of stale responses, for a policy with few possible responses.

A tabular policy with random logits generates a few tokens of a small vocabulary; every response has a fixed advantage.
Training updates the policy version by version; every token of a stale response is sampled with its own older version,
as in a partial rollout. The expected gradient is a sum over all possible responses, computed with `correct_rollout` and
the policy loss of training, so it is exact. `bias` is |E[gradient] - on-policy gradient| / |on-policy gradient|;
`noise` is the standard deviation of the gradient of one response, relative to an on-policy response.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from _report import report

from verl.algos import correct_rollout
from verl.algos.policy_loss.vanilla import compute_policy_loss_vanilla
from verl.config import ActorConfig, RolloutCorrectionConfig, as_config

UNBOUNDED = 1e8
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "no weights": {},
    "rollout_is=token, not truncated": {"rollout_is": "token", "rollout_is_threshold": UNBOUNDED},
    "rollout_is=token, 2": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "rollout_is=sequence, not truncated": {"rollout_is": "sequence", "rollout_is_threshold": UNBOUNDED},
    "rollout_is=sequence, 2": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "rollout_is=token, 0 outside [1/2, 2]": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
    "rollout_rs=token, [1/2, 2]": {"rollout_rs": "token", "rollout_rs_threshold": 2.0},
    "rollout_rs=sequence, [1/2, 2]": {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0},
    "rollout_rs=geometric, [0.8, 1.25]": {"rollout_rs": "geometric", "rollout_rs_threshold": 1.25},
    "rollout_rs=seq_max_k2, 0.1": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.1},
    "rollout_is=token, 2, rollout_rs=token, [1/2, 2]": {
        "rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token", "rollout_rs_threshold": 2.0,
    },
    "bypass_mode, clip 0.2": {"bypass_mode": True},
}  # fmt: skip


@dataclass(frozen=True)
class TabularPolicy:
    """A policy with one row of logits per prefix, and all its possible responses; tensors are float64."""

    responses: torch.Tensor
    """[responses, tokens]: token ids."""
    prefix_rows: torch.Tensor
    """[responses, tokens]: row of the logits table, given by the preceding tokens."""
    advantages: torch.Tensor
    """[responses]"""
    versions: list[torch.Tensor]
    """Logits [prefixes, vocab] before the first update and after each one."""

    @classmethod
    def random(cls, seed: int, vocab: int, tokens: int, updates: int, rate: float) -> TabularPolicy:
        """A random policy, trained on-policy for `updates` versions."""
        generator = torch.Generator().manual_seed(seed)
        responses = list(product(range(vocab), repeat=tokens))
        prefixes = {
            prefix: row for row, prefix in enumerate(dict.fromkeys(r[:t] for r in responses for t in range(tokens)))
        }
        policy = cls(
            torch.tensor(responses),
            torch.tensor([[prefixes[response[:t]] for t in range(tokens)] for response in responses]),
            torch.randn(len(responses), generator=generator, dtype=torch.float64),
            [torch.randn(len(prefixes), vocab, generator=generator, dtype=torch.float64)],
        )
        for _ in range(updates):
            policy.versions.append(policy.versions[-1] + rate * policy.on_policy(len(policy.versions) - 1)[0])
        return policy

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """[responses, tokens]"""
        return logits.log_softmax(-1)[self.prefix_rows, self.responses]

    def behavior_log_probs(self, versions: list[int]) -> torch.Tensor:
        """[responses, tokens]: log-probs if token t is sampled with version `versions[t]`."""
        by_version = torch.stack([self.log_probs(self.versions[version]) for version in versions], -1)
        return by_version.diagonal(dim1=1, dim2=2)

    def on_policy(self, version: int) -> tuple[torch.Tensor, float]:
        """Expected gradient [prefixes, vocab] of responses of this version; standard deviation of one response."""
        log_probs = self.log_probs(self.versions[version])
        return self._gradient(version, log_probs.sum(-1).exp(), self.advantages[:, None].expand_as(log_probs))

    def off_policy(
        self, version: int, token_versions: list[int], correction: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """Like `on_policy`, for responses whose tokens were sampled with older versions, with the loss of training."""
        rollout = self.behavior_log_probs(token_versions)
        old = self.log_probs(self.versions[version])
        actor, correction_config = _configs(tuple(correction.items()))
        corrected = correct_rollout(old, rollout, torch.ones_like(self.responses), correction_config)
        log_prob = old.clone().requires_grad_()
        loss, _ = compute_policy_loss_vanilla(
            rollout if correction.get("bypass_mode") else old,
            log_prob,
            self.advantages[:, None].expand_as(old),
            corrected.response_mask,
            "token-sum",
            actor,
            rollout_is_weights=corrected.weights,
        )
        (per_token,) = torch.autograd.grad(-loss, log_prob)
        return self._gradient(version, rollout.sum(-1).exp(), per_token)

    def _gradient(self, version: int, probability: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Mean and standard deviation of the gradient of sum(`factors` × log-probs) over responses.

        `probability` [responses]; `factors` [responses, tokens].
        """
        logits = self.versions[version]
        one_hot = torch.nn.functional.one_hot(self.responses, logits.shape[1])
        scores = factors[..., None] * (one_hot - logits.softmax(-1)[self.prefix_rows])  # [responses, tokens, vocab]
        mean = torch.zeros_like(logits)
        mean.index_put_((self.prefix_rows,), probability[:, None, None] * scores, accumulate=True)
        # The prefixes of a response differ, so the squared norm of its gradient is the sum over its tokens.
        variance = (probability * scores.square().sum((1, 2))).sum() - mean.square().sum()
        return mean, float(variance.clamp(min=0).sqrt())


@functools.cache
def _configs(correction: tuple[tuple[str, Any], ...]) -> tuple[ActorConfig, RolloutCorrectionConfig]:
    """Cached, because creating them takes longer than the sum over all responses."""
    return as_config(ActorConfig, None), as_config(RolloutCorrectionConfig, dict(correction))


def token_versions(newest: int, staleness: int, tokens: int) -> list[int]:
    """Versions of a partial rollout: the first token is `staleness` versions old, the last one current."""
    return [newest - staleness + round(token * staleness / max(1, tokens - 1)) for token in range(tokens)]


def bias_and_noise(
    correction: Mapping[str, Any], staleness: int, policies: Sequence[TabularPolicy]
) -> tuple[float, float]:
    """Means over policies, each with `staleness` updates."""
    biases, noises = [], []
    for policy in policies:
        expected, expected_deviation = policy.on_policy(staleness)
        versions = token_versions(staleness, staleness, policy.responses.shape[1])
        gradient, deviation = policy.off_policy(staleness, versions, correction)
        biases.append(float((gradient - expected).norm() / expected.norm()))
        noises.append(deviation / expected_deviation)
    return sum(biases) / len(biases), sum(noises) / len(noises)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=3, help="vocabulary size")
    parser.add_argument("--tokens", type=int, default=6, help="tokens of a response")
    parser.add_argument("--rate", type=float, default=2.0, help="learning rate")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--policies", type=int, default=8, help="number of random policies, over which the mean is taken"
    )
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    policies = {
        staleness: [
            TabularPolicy.random(seed, options.words, options.tokens, staleness, options.rate)
            for seed in range(options.policies)
        ]
        for staleness in options.staleness
    }
    rows = []
    for name, correction in CORRECTIONS.items():
        row: dict[str, Any] = {"algorithm.rollout_correction": name}
        for staleness in options.staleness:
            bias, noise = bias_and_noise(correction, staleness, policies[staleness])
            row |= {f"bias {staleness}": f"{bias:.1%}", f"noise {staleness}": f"{noise:.2f}"}
        rows.append(row)
    differences = []
    for staleness in options.staleness:
        policy = policies[staleness][0]
        old, new = policy.log_probs(policy.versions[0]), policy.log_probs(policy.versions[-1])
        differences.append(float(((new - old).abs() * old.sum(-1).exp()[:, None]).sum() / options.tokens))
    print("mean |log-prob difference| of a token at staleness " + ", ".join(
        f"{staleness}: {value:.3f}" for staleness, value in zip(options.staleness, differences, strict=True)
    ))  # fmt: skip
    title = f"expected gradient of stale responses, {options.tokens} tokens, vocabulary {options.words}, by staleness"
    report(title, rows, options.json)


if __name__ == "__main__":
    main()
