"""From rewards to advantages: one file per estimator, whose row in `verl.config.names` makes it known."""

from verl.algos.advantage.estimate import AdvantageEstimator, estimate_advantages, takes_argument

__all__ = ["AdvantageEstimator", "estimate_advantages", "takes_argument"]
