"""The rollout's word against the trainer's: corrected as configured, measured always, said once where it is large."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from verl.algos import correct_rollout
from verl.algos.trajectories import Trajectories
from verl.config import RolloutCorrectionConfig
from verl.protocol import DataProto

logger = logging.getLogger(__name__)

# With bypass_mode the trainer's log-probs of one trajectory in so many are computed, to measure the mismatch.
_ONE_IN = 16
# What the same numbers are called as well.
_OLD_NAMES = {
    "rollout/log_prob_diff_mean": "rollout_corr/log_prob_diff",
    "rollout/log_prob_diff_p99": "rollout_corr/log_prob_diff_p99",
    "rollout/log_prob_diff_max": "rollout_corr/log_prob_diff_max",
    "rollout/mismatch_kl": "rollout_corr/k3_kl",
}


class RolloutMismatch:
    """Applies `algorithm.rollout_correction` to batches that have the columns it reads (`types.schema`)."""

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._said: set[str] = set()

    def correct(self, batch: DataProto, columns: DataProto) -> dict[str, float]:
        """Weights and mask into `batch`, computed from `columns` (the same rows, on the controller); metrics.

        A sequence is a whole trajectory. Nothing where the rollout gave no log-probs and none are needed.
        """
        if not self._can_compare(columns):
            return {}
        given, whole = columns.batch, Trajectories.of(columns)
        correction = correct_rollout(
            whole.join(given["old_log_probs"]),
            whole.join(given["rollout_log_probs"]),
            whole.mask,
            self._config,
            whole.join(given["rollout_drawn_log_probs"]) if "rollout_drawn_log_probs" in given.keys() else None,
        )
        if correction.weights is not None:
            batch.batch["rollout_is_weights"] = whole.split(correction.weights)
        if self._config.rollout_rs is not None:
            batch.batch["response_mask"] = whole.split(correction.response_mask)
        self._warn(correction.metrics)
        return correction.metrics | {old: correction.metrics[name] for old, name in _OLD_NAMES.items()}

    def denominator(self, batch: DataProto) -> torch.Tensor:
        """The rollout's log-probs [batch, response] that bypass_mode takes as the old ones."""
        drawn = self._config.denominator == "drawn" and "rollout_drawn_log_probs" in batch.batch.keys()
        return batch.batch["rollout_drawn_log_probs" if drawn else "rollout_log_probs"]

    def sample(self, batch: DataProto, ranks: int) -> np.ndarray:
        """Rows to measure on where not all are: of every 16th trajectory, and of one per rank at least."""
        whole = Trajectories.of(batch)
        wanted = min(len(whole), max(ranks, len(whole) // _ONE_IN))
        chosen = np.linspace(0, len(whole) - 1, wanted).round().astype(np.int64)
        return np.flatnonzero(np.isin(whole.of_row, chosen))

    def _can_compare(self, columns: DataProto) -> bool:
        if "rollout_log_probs" in columns.batch.keys():
            return True
        missing = "the batch has no column rollout_log_probs: a turn of the model's came without log_probs"
        for name in ("rollout_is", "rollout_rs", "bypass_mode"):
            if self._config[name]:
                raise ValueError(
                    f"algorithm.rollout_correction.{name} = {self._config[name]}: {missing}. Let the rollout or agent"
                    " pass on the engine's, or leave the key out."
                )
        if "missing" not in self._said:
            self._said.add("missing")
            logger.warning("rollout and training are not compared: %s. Said once.", missing)
        return False

    def _warn(self, metrics: Mapping[str, float]) -> None:
        # What sampling cuts off was said at start, and is no fault of the engines.
        measured = "engine_log_prob_diff" if "rollout_corr/engine_log_prob_diff" in metrics else "log_prob_diff"
        difference, limit = metrics[f"rollout_corr/{measured}"], self._config.warn_log_prob_diff
        if difference <= limit or "difference" in self._said:
            return
        self._said.add("difference")
        logger.warning(
            "rollout and training differ by %.3g in the log-prob of a token on average (more than"
            " algorithm.rollout_correction.warn_log_prob_diff = %g): the policy that answered is not quite the one that"
            " learns. Weigh the tokens with algorithm.rollout_correction.rollout_is=token, mask them with"
            " algorithm.rollout_correction.rollout_rs=token, or give both engines the same precision. Said once; the"
            " metrics rollout_corr/* show every step.",
            difference,
            limit,
        )


def sampled_by(batch: DataProto, version: int) -> bool:
    """Whether this version of the weights sampled every token; a rollout that gives no versions is taken at its word
    that it has the last ones."""
    if "rollout_versions" not in batch.batch.keys():
        return True
    mask = batch.batch["response_mask"].bool()
    return bool((batch.batch["rollout_versions"] == version)[mask].all())
