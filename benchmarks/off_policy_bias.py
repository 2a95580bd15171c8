"""How far the gradient of stale answers is from the on-policy one, exactly: a policy whose answers can all be counted.

A random table of logits answers with a few tokens of a few words; every answer has a fixed advantage. Training moves it
version by version; answers are drawn with older versions, each token with one of its own as in a partial rollout. The
expected gradient is a sum over all answers, through `correct_rollout` and the policy loss that training uses: no noise.
`bias` is |E[gradient] - on-policy gradient| / |on-policy gradient|; `noise` the standard deviation of one answer's
gradient over that of an on-policy answer.
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
FORMS: Mapping[str, Mapping[str, Any]] = {
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
class Toy:
    """All answers of a policy; tensors are float64."""

    answers: torch.Tensor
    """[answers, tokens]: token ids."""
    places: torch.Tensor
    """[answers, tokens]: the row of the table of logits that each token is drawn from: what stands before it."""
    advantages: torch.Tensor
    """[answers]"""
    versions: list[torch.Tensor]
    """[prefixes, words] each: the logits after so many updates."""

    @classmethod
    def make(cls, seed: int, words: int, tokens: int, updates: int, rate: float) -> Toy:
        """A random policy that has learned from its own answers for `updates` versions."""
        random = torch.Generator().manual_seed(seed)
        answers = list(product(range(words), repeat=tokens))
        prefixes = {
            prefix: row for row, prefix in enumerate(dict.fromkeys(a[:t] for a in answers for t in range(tokens)))
        }
        toy = cls(
            torch.tensor(answers),
            torch.tensor([[prefixes[answer[:t]] for t in range(tokens)] for answer in answers]),
            torch.randn(len(answers), generator=random, dtype=torch.float64),
            [torch.randn(len(prefixes), words, generator=random, dtype=torch.float64)],
        )
        for _ in range(updates):
            toy.versions.append(toy.versions[-1] + rate * toy.on_policy(len(toy.versions) - 1)[0])
        return toy

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """[answers, tokens]"""
        return logits.log_softmax(-1)[self.places, self.answers]

    def drawn(self, versions: list[int]) -> torch.Tensor:
        """[answers, tokens]: log-probs of tokens where those at place t are drawn with version `versions[t]`."""
        each = torch.stack([self.log_probs(self.versions[version]) for version in versions], -1)
        return each.diagonal(dim1=1, dim2=2)

    def on_policy(self, version: int) -> tuple[torch.Tensor, float]:
        """The expected gradient [prefixes, words] of answers by this version, and one answer's standard deviation."""
        log_probs = self.log_probs(self.versions[version])
        return self._gradient(version, log_probs.sum(-1).exp(), self.advantages[:, None].expand_as(log_probs))

    def off_policy(self, version: int, drawn: list[int], form: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
        """The same of answers whose tokens were drawn with older versions, as training computes it."""
        rollout = self.drawn(drawn)
        old = self.log_probs(self.versions[version])
        actor, correction = _configs(tuple(form.items()))
        corrected = correct_rollout(old, rollout, torch.ones_like(self.answers), correction)
        log_prob = old.clone().requires_grad_()
        loss, _ = compute_policy_loss_vanilla(
            rollout if form.get("bypass_mode") else old,
            log_prob,
            self.advantages[:, None].expand_as(old),
            corrected.response_mask,
            "token-sum",
            actor,
            rollout_is_weights=corrected.weights,
        )
        (per_token,) = torch.autograd.grad(-loss, log_prob)
        return self._gradient(version, rollout.sum(-1).exp(), per_token)

    def _gradient(self, version: int, chance: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Of the sum of `factors` [answers, tokens] x log-probs: mean and deviation over answers of this chance."""
        logits = self.versions[version]
        one_hot = torch.nn.functional.one_hot(self.answers, logits.shape[1])
        scores = factors[..., None] * (one_hot - logits.softmax(-1)[self.places])  # [answers, tokens, words]
        mean = torch.zeros_like(logits)
        mean.index_put_((self.places,), chance[:, None, None] * scores, accumulate=True)
        # An answer's places are all different: the squares of its gradient are those of its tokens.
        variance = (chance * scores.square().sum((1, 2))).sum() - mean.square().sum()
        return mean, float(variance.clamp(min=0).sqrt())


@functools.cache
def _configs(form: tuple[tuple[str, Any], ...]) -> tuple[ActorConfig, RolloutCorrectionConfig]:
    """Once for each form: making them takes longer than a sum over all answers."""
    return as_config(ActorConfig, None), as_config(RolloutCorrectionConfig, dict(form))


def token_versions(newest: int, staleness: int, tokens: int) -> list[int]:
    """A partial rollout: its first token is `staleness` old, its last one new."""
    return [newest - staleness + round(place * staleness / max(1, tokens - 1)) for place in range(tokens)]


def measured(form: Mapping[str, Any], staleness: int, toys: Sequence[Toy]) -> tuple[float, float]:
    """Bias and noise, as means over random policies that have so many versions."""
    biases, noises = [], []
    for toy in toys:
        wanted, spread = toy.on_policy(staleness)
        versions = token_versions(staleness, staleness, toy.answers.shape[1])
        found, noise = toy.off_policy(staleness, versions, form)
        biases.append(float((found - wanted).norm() / wanted.norm()))
        noises.append(noise / spread)
    return sum(biases) / len(biases), sum(noises) / len(noises)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2.0, help="of learning: how far one version is from the next")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--policies", type=int, default=8, help="random ones, over which figures are means")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    toys = {
        staleness: [
            Toy.make(seed, options.words, options.tokens, staleness, options.rate) for seed in range(options.policies)
        ]
        for staleness in options.staleness
    }
    rows = []
    for name, form in FORMS.items():
        row: dict[str, Any] = {"algorithm.rollout_correction": name}
        for staleness in options.staleness:
            bias, noise = measured(form, staleness, toys[staleness])
            row |= {f"bias {staleness}": f"{bias:.1%}", f"noise {staleness}": f"{noise:.2f}"}
        rows.append(row)
    apart = []
    for staleness in options.staleness:
        toy = toys[staleness][0]
        old, new = toy.log_probs(toy.versions[0]), toy.log_probs(toy.versions[-1])
        apart.append(float(((new - old).abs() * old.sum(-1).exp()[:, None]).sum() / options.tokens))
    print("mean |log-prob difference| of a token at staleness " + ", ".join(
        f"{staleness}: {value:.3f}" for staleness, value in zip(options.staleness, apart, strict=True)
    ))  # fmt: skip
    title = f"expected gradient of stale answers, {options.tokens} tokens of {options.words} words, by staleness"
    report(title, rows, options.json)


if __name__ == "__main__":
    main()
