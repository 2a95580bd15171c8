"""Bradley-Terry: what scores of compared answers cost, and how well they say which answer is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import logsigmoid

_BINS = 10
_NO_WEIGHT = 1e-12


@dataclass(frozen=True)
class Pairs:
    """Comparisons between answers of a batch; all [pairs]."""

    chosen: torch.Tensor
    """The answer's place in the batch."""
    rejected: torch.Tensor
    preference: torch.Tensor
    """The probability that `chosen` is the better one: 1, or 0.5 for a tie, or what several judges said."""
    margin: torch.Tensor
    """How much better the better one should score; of a tie, neither."""
    weight: torch.Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, some: torch.Tensor) -> Pairs:
        """Those that a mask [pairs] marks."""
        return Pairs(**{name: column[some] for name, column in vars(self).items()})

    @classmethod
    def joined(cls, parts: Sequence[Pairs], answers: Sequence[int]) -> Pairs:
        """Those of batches that follow each other, which have so many answers each."""
        starts = [sum(answers[:number]) for number in range(len(answers))]
        moved = [
            {"chosen": part.chosen + start, "rejected": part.rejected + start}
            for part, start in zip(parts, starts, strict=True)
        ]
        columns = [{**vars(part), **places} for part, places in zip(parts, moved, strict=True)]
        return cls(**{field.name: torch.cat([column[field.name] for column in columns]) for field in fields(cls)})


def preference_loss(
    scores: torch.Tensor, pairs: Pairs, centering: float = 0.0, weight: float | None = None
) -> torch.Tensor:
    """The weighted mean over pairs of the cross-entropy of `preference` with sigmoid(r_c - r_r - margin), plus
    `centering` times that of (r_c + r_r)², which only says where 0 is (arXiv 2312.09244).

    `scores`: [answers]. With preference 1 it is -log sigmoid(r_c - r_r - margin) (Bradley-Terry; margins as in
    arXiv 2307.09288). Below 0.5 the margin is the other one's, and a tie has none: a pair and its mirror image cost the
    same. Where these are some of the pairs that the mean is over, `weight` is that of all of them, and the
    parts add up to the mean.
    """
    chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
    apart = chosen - rejected - pairs.margin * (pairs.preference - 0.5).sign()
    costs = -pairs.preference * logsigmoid(apart) - (1 - pairs.preference) * logsigmoid(-apart)
    if centering:
        costs = costs + centering * (chosen + rejected) ** 2
    total = pairs.weight.sum().clamp(min=_NO_WEIGHT) if weight is None else max(weight, _NO_WEIGHT)
    return (pairs.weight * costs).sum() / total


def score_slopes(
    scores: torch.Tensor, pairs: Pairs, centering: float = 0.0, weight: float | None = None
) -> torch.Tensor:
    """The derivative of that loss by every score [answers].

    The gradient of the loss by weights is the sum over answers of slope × gradient of the score: with the slopes known,
    answers can be learned one by one, in any micro-batch and on any rank.
    """
    scores = scores.detach().double().requires_grad_()
    (slopes,) = torch.autograd.grad(preference_loss(scores, pairs, centering, weight), scores)
    return slopes.float()


def preference_metrics(scores: torch.Tensor, pairs: Pairs) -> dict[str, float]:
    """How the pairs are told apart; each counts once, whatever its weight in the loss.

    `accuracy`: the better answer scores higher (equal scores are half right; ties are left out). `margin`: by how much.
    """
    decided = pairs.preference != 0.5
    side = (pairs.preference[decided] - 0.5).sign()
    apart = (scores[pairs.chosen] - scores[pairs.rejected]).double()[decided] * side
    return {
        "accuracy": float((apart.sign() + 1).mean() / 2) if len(apart) else 0.5,
        "margin": float(apart.mean()) if len(apart) else 0.0,
        "score_mean": float(scores.double().mean()),
        "score_std": float(scores.double().std(correction=0)),
    }


def validation_metrics(scores: torch.Tensor, lengths: torch.Tensor, pairs: Pairs, centering: float) -> dict[str, float]:
    """Those, the loss, and what tells a good reward model from one that only looks good.

    `calibration_error`: in ten bins of confidence (the probability given to the answer that scores higher), how far the
    share of right choices is from the mean confidence (ECE, arXiv 1706.04599). `length_correlation`: Pearson's, of
    scores and `lengths`. `longer_is_better`: the accuracy of preferring the longer answer of each pair.
    """
    apart = (scores[pairs.chosen] - scores[pairs.rejected]).double()
    longer = preference_metrics(lengths.double(), pairs)["accuracy"]
    return preference_metrics(scores, pairs) | {
        "loss": float(preference_loss(scores.double(), pairs, centering)),
        "calibration_error": calibration_error(apart.sigmoid(), pairs.preference.double()),
        "length_correlation": correlation(scores, lengths),
        "longer_is_better": longer,
    }


def calibration_error(given: torch.Tensor, truth: torch.Tensor) -> float:
    """`given`: the probability that the first of two is better; `truth`: how often it was; both [pairs]."""
    confidence = torch.maximum(given, 1 - given)
    right = torch.where(given >= 0.5, truth, 1 - truth)
    bins = ((confidence - 0.5) * 2 * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=given.dtype).index_add(0, bins, right - confidence)
    return float(gaps.abs().sum() / len(given))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson's; 0 where one of them is constant."""
    a, b = (values.double() - values.double().mean() for values in (a, b))
    norm = a.norm() * b.norm()
    return float(a @ b / norm) if norm > 0 else 0.0
