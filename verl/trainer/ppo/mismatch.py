"""RolloutMismatch: compute old log-probs; measure and correct their mismatch with the log-probs of the rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from verl.algos import correct_rollout
from verl.algos.groups import Trajectories
from verl.config import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import reference_metrics
from verl.trainer.ppo.row_balancing import local_columns
from verl.types.schema import columns_read_by
from verl.utils.torch_functional import masked_mean

logger = logging.getLogger(__name__)

# With bypass_mode, the trainer computes the log-probs of every n-th trajectory to measure the mismatch.
_SAMPLE_EVERY = 16
# Keys that need the rollout's log-probs.
_CORRECTION_KEYS = ("rollout_is", "rollout_rs", "bypass_mode")
# Factor on the limit for a warning if the mismatch is corrected.
_CORRECTED_LIMIT_FACTOR = 10
# Further names of the same metrics.
_METRIC_ALIASES = {
    "rollout/log_prob_diff_mean": "rollout_corr/log_prob_diff",
    "rollout/log_prob_diff_p99": "rollout_corr/log_prob_diff_p99",
    "rollout/log_prob_diff_max": "rollout_corr/log_prob_diff_max",
    "rollout/mismatch_kl": "rollout_corr/k3_kl",
}


class RolloutMismatch:
    """Applies `algorithm.rollout_correction` to batches.

    The rollout reports log-probs of the full distribution (`rollout_log_probs`) and, if sampling truncates it (top-k,
    top-p), of the distribution it drew from (`rollout_drawn_log_probs`).
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._warned: set[str] = set()

    def add_old_log_probs(
        self, batch: DataProto, infer: Callable[[DataProto], DataProto], ranks: int
    ) -> tuple[DataProto, dict[str, float]]:
        """Add `old_log_probs` [batch, response]; return the batch and its metrics.

        `infer` runs a forward pass of the current policy on `ranks` ranks. With `bypass_mode` it runs on a sample of
        the rows only, to measure the mismatch; the other rows use the log-probs of the rollout.
        """
        bypass, measured = self._config.bypass_mode, batch
        if bypass:
            self.require_one_row_each(batch)
            rows = self.sample(batch, ranks)
            measured = batch.select_idxs(rows)
        result = infer(measured)
        entropy = result.pop(["entropys"]).batch["entropys"]
        metrics = {"actor/entropy": float(masked_mean(entropy, measured.batch["response_mask"]))}
        if not bypass:
            return batch.union(result), metrics
        measured, names = measured.union(result), columns_read_by("correction")
        metrics |= self.correct(measured, local_columns(measured, names, names))
        batch.batch["old_log_probs"] = self.bypass_log_probs(batch, rows, measured.batch["old_log_probs"])
        return batch, metrics

    def compare_old_log_probs(self, batch: DataProto) -> dict[str, float]:
        """Compare the `old_log_probs` that the update has computed with those of reference and rollout; return
        metrics."""
        names = (*columns_read_by("correction"), "ref_log_prob")
        columns = local_columns(batch, names, names)
        return reference_metrics(columns) | self.correct(batch, columns)

    def correct(self, batch: DataProto, columns: DataProto) -> dict[str, float]:
        """Add importance weights and mask to `batch`; return metrics. `columns`: the same rows, on the controller.

        A sequence is a whole trajectory. No effect if the rollout reported no log-probs and no key needs them.
        """
        trajectories, (full, drawn, only_drawn) = Trajectories.of(columns), self._rollout_log_probs(columns)
        if full is None:
            return {}
        correction = correct_rollout(
            trajectories.join(columns.batch["old_log_probs"]),
            trajectories.join(full),
            trajectories.mask,
            self._config,
            None if drawn is None else trajectories.join(drawn),
        )
        if correction.weights is not None:
            batch.batch["rollout_is_weights"] = trajectories.split(correction.weights)
        if self._config.rollout_rs is not None:
            batch.batch["response_mask"] = trajectories.split(correction.response_mask)
        if not only_drawn:  # otherwise the difference includes the truncation of the distribution
            self._warn_if_large(correction.metrics)
        return correction.metrics | {alias: correction.metrics[name] for alias, name in _METRIC_ALIASES.items()}

    def add_denominator(self, batch: DataProto, columns: DataProto) -> None:
        """Add `denominator_log_probs`, the rollout's log-probs in the importance ratio, for an update that computes the
        weights itself. No effect without `rollout_is`, or if the rollout reported no log-probs.

        `columns`: the same rows, on the controller.
        """
        full, drawn, _ = self._rollout_log_probs(columns)
        if self._config.rollout_is is None or full is None:
            return
        denominator = drawn if drawn is not None and self._config.denominator == "drawn" else full
        unknown = full.isnan() if drawn is None else full.isnan() | drawn.isnan()
        batch.batch["denominator_log_probs"] = denominator.masked_fill(unknown, torch.nan)

    def _rollout_log_probs(self, columns: DataProto) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
        """Return the rollout's log-probs under the full and under the truncated distribution, where reported, and
        whether those of the truncated one replace the full ones. Raises ValueError if a configured key needs them."""
        full, drawn = (_reported(columns, name) for name in ("rollout_log_probs", "rollout_drawn_log_probs"))
        keys = [name for name in _CORRECTION_KEYS if self._config[name]]
        # Some engines only report log-probs of the truncated distribution.
        if full is None and drawn is not None and (self._config.denominator == "drawn" or not keys):
            return drawn, None, True
        if full is None:
            self._handle_missing_log_probs(keys)
        return full, drawn, False

    def has_weights_by_row(self, batch: DataProto) -> bool:
        """Return whether the importance weights of a row can be computed from this row alone. False if
        `rollout_is=sequence` and a trajectory has several rows."""
        return self._config.rollout_is != "sequence" or Trajectories.of(batch).one_row_each

    def require_one_row_each(self, batch: DataProto) -> None:
        """Raise ValueError if the update computes sequence weights (`bypass_mode`), but trajectories have several rows:
        the update processes rows separately."""
        if self._config.computes_weights_in_loss and not self.has_weights_by_row(batch):
            raise ValueError(
                "algorithm.rollout_correction.rollout_is = sequence with bypass_mode: a trajectory has several rows,"
                " but its ratio cannot be computed from a single row. Set it to token, or bypass_mode=False."
            )

    def bypass_log_probs(self, batch: DataProto, rows: np.ndarray, computed: torch.Tensor) -> torch.Tensor:
        """Return the old log-probs [batch, response] of `bypass_mode`: log-probs of the rollout, or of the trainer for
        tokens without them. `computed`: the trainer's log-probs of these `rows`, padded to the longest of them."""
        log_probs, width = self._denominator(batch).clone(), computed.shape[1]
        reported = log_probs[rows, :width]
        log_probs[rows, :width] = torch.where(reported.isnan(), computed.to(reported.dtype), reported)
        return log_probs

    def sample(self, batch: DataProto, ranks: int) -> np.ndarray:
        """Return the rows to measure with `bypass_mode`: all rows of every 16th trajectory, at least one trajectory per
        rank, and rows with tokens for which the rollout reported no log-prob."""
        trajectories = Trajectories.of(batch)
        count = min(len(trajectories), max(ranks, len(trajectories) // _SAMPLE_EVERY))
        numbers = np.linspace(0, len(trajectories) - 1, count).round().astype(np.int64)
        chosen = np.isin(trajectories.of_row, numbers)
        if "rollout_log_probs" in batch.batch.keys():
            chosen |= self._denominator(batch).isnan().any(dim=-1).numpy()
        return np.flatnonzero(chosen)

    def _denominator(self, batch: DataProto) -> torch.Tensor:
        """Return the rollout's log-probs that the correction divides by (`rollout_correction.denominator`)."""
        drawn = _reported(batch, "rollout_drawn_log_probs") if self._config.denominator == "drawn" else None
        return batch.batch["rollout_log_probs"] if drawn is None else drawn

    def _handle_missing_log_probs(self, keys: Sequence[str]) -> None:
        """Raise ValueError if the user has set one of these keys, which need the log-probs; else warn once."""
        missing = "the rollout reported no log-prob for any sampled token"
        for name in keys:
            if name == "rollout_is" and self._config.rollout_is_from_auto:
                continue
            raise ValueError(
                f"algorithm.rollout_correction.{name} = {self._config[name]}: {missing}. Let the rollout or agent"
                " return the engine's log-probs, or set the key to null (bypass_mode: False)."
            )
        if "missing" not in self._warned:
            self._warned.add("missing")
            stale = " Stale responses are not corrected, which biases training." if keys else ""
            logger.warning("rollout and training are not compared: %s.%s Reported once.", missing, stale)

    def _warn_if_large(self, metrics: Mapping[str, float]) -> None:
        # Differences by truncated sampling are reported at the start of the run, and not included here.
        measured = "engine_log_prob_diff" if "rollout_corr/engine_log_prob_diff" in metrics else "log_prob_diff"
        difference, limit = metrics[f"rollout_corr/{measured}"], self._config.warn_log_prob_diff
        if corrected := any(self._config[name] for name in _CORRECTION_KEYS):
            limit *= _CORRECTED_LIMIT_FACTOR
        if difference <= limit or "difference" in self._warned:
            return
        self._warned.add("difference")
        remedy = "Set algorithm.rollout_correction.rollout_is=token or rollout_rs=token_k1, or"
        if corrected:
            remedy = "It is corrected, but too large for that: lower trainer.max_staleness, or"
        logger.warning(
            "rollout and training differ by %.3g in the log-prob of a token on average (limit: %g, by"
            " algorithm.rollout_correction.warn_log_prob_diff): the policy that generates is not exactly the one that"
            " is trained. %s use the same precision for both engines. Reported once; the metrics rollout_corr/* show"
            " every step.",
            *(difference, limit, remedy),
        )


def _reported(batch: DataProto, name: str) -> torch.Tensor | None:
    """Return a column of the rollout's log-probs; None if the batch lacks it or it is NaN for all unmasked tokens."""
    column = batch.batch[name] if name in batch.batch.keys() else None
    if column is None or (column.isnan().any() and column[batch.batch["response_mask"].bool()].isnan().all()):
        return None
    return column
