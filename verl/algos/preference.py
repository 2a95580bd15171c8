"""Bradley-Terry preference loss on the scores of compared responses, and metrics of reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import logsigmoid

_BINS = 10
_MIN_WEIGHT = 1e-12


@dataclass(frozen=True)
class Pairs:
    """Pairs of compared responses of a batch; all [pairs]."""

    chosen: torch.Tensor
    """Row of the response in the batch."""
    rejected: torch.Tensor
    preference: torch.Tensor
    """Probability that `chosen` is the better one: 1, 0.5 for a tie, or the mean of several annotators."""
    margin: torch.Tensor
    """Minimum difference between the scores of the better and the worse one; ignored for ties."""
    weight: torch.Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, mask: torch.Tensor) -> Pairs:
        """Select pairs by a boolean mask [pairs]."""
        return Pairs(**{name: column[mask] for name, column in vars(self).items()})

    @classmethod
    def concat(cls, parts: Sequence[Pairs], responses: Sequence[int]) -> Pairs:
        """Concatenate the pairs of batches; `responses`: number of responses of each batch."""
        starts = [sum(responses[:number]) for number in range(len(responses))]
        columns = [
            {**vars(part), "chosen": part.chosen + start, "rejected": part.rejected + start}
            for part, start in zip(parts, starts, strict=True)
        ]
        return cls(**{field.name: torch.cat([column[field.name] for column in columns]) for field in fields(cls)})


def preference_loss(
    scores: torch.Tensor, pairs: Pairs, centering: float = 0.0, weight: float | None = None
) -> torch.Tensor:
    """Return the weighted mean over pairs of the cross-entropy of `preference` with sigmoid(r_c - r_r - margin), plus
    `centering` × (r_c + r_r)², which keeps the mean score near 0 (arXiv 2312.09244).

    `scores`: [responses]. With preference 1 it is -log sigmoid(r_c - r_r - margin) (Bradley-Terry; margins as in
    arXiv 2307.09288). With a preference below 0.5 the margin has the opposite sign, and for ties it is 0, so swapping
    `chosen` and `rejected` does not change the loss. If `pairs` are only a part of the pairs of a step, `weight` is the
    total weight of all of them, and the losses of the parts add up to the mean.
    """
    costs = pair_losses(scores, pairs, centering)
    total = pairs.weight.sum().clamp(min=_MIN_WEIGHT) if weight is None else max(weight, _MIN_WEIGHT)
    return (pairs.weight * costs).sum() / total


def pair_losses(scores: torch.Tensor, pairs: Pairs, centering: float = 0.0) -> torch.Tensor:
    """Return the loss of each pair [pairs], without its weight (see `preference_loss`)."""
    chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
    difference = chosen - rejected - pairs.margin * (pairs.preference - 0.5).sign()
    costs = -pairs.preference * logsigmoid(difference) - (1 - pairs.preference) * logsigmoid(-difference)
    if centering:
        costs = costs + centering * (chosen + rejected) ** 2
    return costs


def score_gradients(
    scores: torch.Tensor, pairs: Pairs, centering: float = 0.0, weight: float | None = None
) -> torch.Tensor:
    """Return the gradient of `preference_loss` with respect to the scores [responses].

    The gradient of the loss with respect to the weights is the sum over responses of this gradient × the gradient of
    the score, so responses of a pair can be trained in different micro-batches and on different ranks.
    """
    scores = scores.detach().double().requires_grad_()
    (gradients,) = torch.autograd.grad(preference_loss(scores, pairs, centering, weight), scores)
    return gradients.float()


def preference_metrics(scores: torch.Tensor, pairs: Pairs) -> dict[str, float]:
    """Return metrics of the scores over pairs, independent of their weights.

    `accuracy`: fraction of pairs whose better response has the higher score (equal scores count half; ties are
    excluded). `margin`: mean score difference of these pairs.
    """
    decided = pairs.preference != 0.5
    side = (pairs.preference[decided] - 0.5).sign()
    difference = (scores[pairs.chosen] - scores[pairs.rejected]).double()[decided] * side
    return {
        "accuracy": float((difference.sign() + 1).mean() / 2) if len(difference) else 0.5,
        "margin": float(difference.mean()) if len(difference) else 0.0,
        "score_mean": float(scores.double().mean()),
        "score_std": float(scores.double().std(correction=0)),
    }


def validation_metrics(scores: torch.Tensor, lengths: torch.Tensor, pairs: Pairs, centering: float) -> dict[str, float]:
    """Return `preference_metrics`, the loss, calibration, and the influence of the length.

    `calibration_error`: expected calibration error (see `calibration_error`). `length_correlation`: Pearson correlation
    of scores and `lengths`. `longer_is_better`: accuracy of always preferring the longer response.
    """
    difference = (scores[pairs.chosen] - scores[pairs.rejected]).double()
    longer = preference_metrics(lengths.double(), pairs)["accuracy"]
    return preference_metrics(scores, pairs) | {
        "loss": float(preference_loss(scores.double(), pairs, centering)),
        "calibration_error": calibration_error(difference.sigmoid(), pairs.preference.double()),
        "length_correlation": correlation(scores, lengths),
        "longer_is_better": longer,
    }


def calibration_error(predicted: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the expected calibration error in ten bins of confidence (ECE, arXiv 1706.04599).

    `predicted`: probability that the first of two is better; `truth`: observed frequency; both [pairs].
    """
    confidence = torch.maximum(predicted, 1 - predicted)
    accuracy = torch.where(predicted >= 0.5, truth, 1 - truth)
    bins = ((confidence - 0.5) * 2 * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=predicted.dtype).index_add(0, bins, accuracy - confidence)
    return float(gaps.abs().sum() / len(predicted))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the Pearson correlation; 0 if one of the tensors is constant."""
    a, b = (values.double() - values.double().mean() for values in (a, b))
    norm = a.norm() * b.norm()
    return float(a @ b / norm) if norm > 0 else 0.0
