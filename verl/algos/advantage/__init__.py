"""From rewards to advantages: one file per estimator, which declares its name and traits."""

from verl.algos.advantage.estimate import AdvantageEstimator, estimate_advantages, takes_argument

__all__ = ["AdvantageEstimator", "estimate_advantages", "takes_argument"]
