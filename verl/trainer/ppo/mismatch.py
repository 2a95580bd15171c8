"""The rollout's word against the trainer's: corrected as configured, measured always, said once where it is large."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl.algos import correct_rollout
from verl.algos.trajectories import Trajectories
from verl.config import RolloutCorrectionConfig
from verl.protocol import DataProto

logger = logging.getLogger(__name__)

# With bypass_mode the trainer's log-probs of one trajectory in so many are computed, to measure the mismatch.
_ONE_IN = 16
# Keys that need the rollout's log-probs.
_USERS = ("rollout_is", "rollout_rs", "bypass_mode")
# Of a difference that is corrected, so many times as much is worth a warning.
_RECKONED_WITH = 10
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
        given, drawn, whole = columns.batch, _drawn(columns), Trajectories.of(columns)
        full, users = _known(columns, "rollout_log_probs"), [name for name in _USERS if self._config[name]]
        # Some engines do not know the rest of the distribution.
        only_drawn = full is None and drawn is not None and (self._config.denominator == "drawn" or not users)
        if only_drawn:
            full, drawn = drawn, None
        if full is None:
            self._require_unused(users)
            return {}
        correction = correct_rollout(
            whole.join(given["old_log_probs"]),
            whole.join(full),
            whole.mask,
            self._config,
            None if drawn is None else whole.join(drawn),
        )
        if correction.weights is not None:
            batch.batch["rollout_is_weights"] = whole.split(correction.weights)
        if self._config.rollout_rs is not None:
            batch.batch["response_mask"] = whole.split(correction.response_mask)
        if not only_drawn:  # else what sampling cut off is part of the difference
            self._warn(correction.metrics)
        return correction.metrics | {old: correction.metrics[name] for old, name in _OLD_NAMES.items()}

    def require_whole_sequences(self, batch: DataProto) -> None:
        """Weights that the update takes itself are of what it sees at once: a row."""
        over_sequences = self._config.weighs_in_the_loss and self._config.rollout_is == "sequence"
        if over_sequences and not Trajectories.of(batch).one_row_each:
            raise ValueError(
                "algorithm.rollout_correction.rollout_is = sequence with bypass_mode: a trajectory has several rows,"
                " and its ratio is not known while one of them is trained. Set it to token, or bypass_mode=False."
            )

    def old_log_probs(self, batch: DataProto, rows: np.ndarray, computed: torch.Tensor) -> torch.Tensor:
        """[batch, response]: what bypass_mode takes as the old ones: the rollout's, and those of the trainer
        (`computed`, of these `rows`) for tokens of which the rollout does not know them."""
        taken, width = self._denominator(batch).clone(), computed.shape[1]  # that of the longest of the rows
        given = taken[rows, :width]
        taken[rows, :width] = torch.where(given.isnan(), computed.to(given.dtype), given)
        return taken

    def sample(self, batch: DataProto, ranks: int) -> np.ndarray:
        """Rows to measure on where not all are: of every 16th trajectory, and of one per rank at least; and those with
        tokens of which the rollout does not know the log-probs."""
        whole = Trajectories.of(batch)
        wanted = min(len(whole), max(ranks, len(whole) // _ONE_IN))
        chosen = np.isin(whole.of_row, np.linspace(0, len(whole) - 1, wanted).round().astype(np.int64))
        if "rollout_log_probs" in batch.batch.keys():
            chosen |= self._denominator(batch).isnan().any(dim=-1).numpy()
        return np.flatnonzero(chosen)

    def _denominator(self, batch: DataProto) -> torch.Tensor:
        drawn = _drawn(batch) if self._config.denominator == "drawn" else None
        return batch.batch["rollout_log_probs"] if drawn is None else drawn

    def _require_unused(self, users: Sequence[str]) -> None:
        missing = "no token that the model sampled has a log-prob of the rollout's"
        for name in users:
            if name == "rollout_is" and self._config.by_itself:
                continue
            raise ValueError(
                f"algorithm.rollout_correction.{name} = {self._config[name]}: {missing}. Let the rollout or agent"
                " pass on the engine's, or set the key to null (bypass_mode: False)."
            )
        if "missing" not in self._said:
            self._said.add("missing")
            stale = " Stale answers are not weighed, and training is biased by that." if users else ""
            logger.warning("rollout and training are not compared: %s.%s Said once.", missing, stale)

    def _warn(self, metrics: Mapping[str, float]) -> None:
        # What sampling cuts off was said at start, and is no fault of the engines.
        measured = "engine_log_prob_diff" if "rollout_corr/engine_log_prob_diff" in metrics else "log_prob_diff"
        difference, limit = metrics[f"rollout_corr/{measured}"], self._config.warn_log_prob_diff
        if corrected := any(self._config[name] for name in _USERS):
            limit *= _RECKONED_WITH
        if difference <= limit or "difference" in self._said:
            return
        self._said.add("difference")
        correct = (
            " Weigh tokens with algorithm.rollout_correction.rollout_is=token, mask them with rollout_rs=token_k1, or"
        )
        logger.warning(
            "rollout and training differ by %.3g in the log-prob of a token on average (more than %g, by"
            " algorithm.rollout_correction.warn_log_prob_diff): the policy that answered is not quite the one that"
            " learns.%s give both engines the same precision. Said once; the metrics rollout_corr/* show every step.",
            difference,
            limit,
            " It is corrected, and too far for that: lower trainer.max_staleness, or" if corrected else correct,
        )


def _drawn(batch: DataProto) -> torch.Tensor | None:
    return _known(batch, "rollout_drawn_log_probs")


def _known(batch: DataProto, name: str) -> torch.Tensor | None:
    """A column of the rollout's log-probs; None where it is not there, or knows nothing of any token that counts."""
    column = batch.batch[name] if name in batch.batch.keys() else None
    if column is None or (column.isnan().any() and column[batch.batch["response_mask"].bool()].isnan().all()):
        return None
    return column


def sampled_by(batch: DataProto, version: int) -> bool:
    """Whether this version of the weights sampled every token that counts. One whose version is not known is stale; a
    rollout that gives no column of them is taken at its word that it has the last ones."""
    if "rollout_versions" not in batch.batch.keys():
        return True
    mask = batch.batch["response_mask"].bool()
    return bool((batch.batch["rollout_versions"] == version)[mask].all())
