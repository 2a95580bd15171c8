"""Dynamic sampling (DAPO, arXiv 2503.14476): replaces groups (responses to one prompt) with equal scores.

If all responses to a prompt are correct, or all are wrong, their advantages are 0 and the group has no gradient. A step
generates responses to `data.gen_batch_size` prompts at a time and keeps groups with different scores, until it has
`data.train_batch_size` groups. Prompts of surplus groups are put back: the next step generates responses to them with
its own weights. After `algorithm.filter_groups.max_num_gen_batches` generation batches, the step trains the groups that
it has.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from verl.algos.groups import Groups, Trajectories
from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.common.training_health import no_samples_error
from verl.trainer.ppo.advantage import trajectory_values
from verl.trainer.ppo.generator import with_unique_uids
from verl.trainer.ppo.row_balancing import concat_rows
from verl.trainer.ppo.scoring import SUMMED_AGENT_METRICS
from verl.workers.reward_manager.naive import FAILED_COLUMN

logger = logging.getLogger(__name__)

# Scores with a smaller difference are equal.
_TOLERANCE = 1e-6
# Prefixes of metrics that are summed over generation batches; all others are averaged.
_SUMMED_METRICS = ("reward/errors", *SUMMED_AGENT_METRICS)

GenerateAndScore = Callable[[DataProto, dict[str, float]], DataProto]
"""(prompts, metrics) -> scored responses to the prompts; adds their metrics to `metrics`."""


class PromptSource(Protocol):
    """Source of further prompts: PromptStream, or in async modes GroupStream, which has already generated responses."""

    @property
    def batches_per_epoch(self) -> int:
        """Number of generation batches per epoch."""
        ...

    def next_batch(self) -> DataProto:
        """Return the prompts of the next generation batch."""
        ...

    def put_back(self, prompts: DataProto) -> None:
        """Return prompts to the source; they are generated again."""
        ...

    def reject(self, prompts: DataProto) -> None:
        """Discard prompts: they are not trained on."""
        ...

    def update_sampler(self, batch: DataProto) -> None:
        """Pass scored responses to the sampler of the dataloader, if it is a curriculum."""
        ...


class DynamicSampling:
    """Fills the batch of a step with groups whose responses differ in score."""

    def __init__(self, config: PPOConfig, pad_token_id: int) -> None:
        self._config, self._pad_token_id = config, pad_token_id

    def fill(
        self,
        prompts: DataProto,
        metrics: dict[str, float],
        generate_and_score: GenerateAndScore,
        source: PromptSource,
        reward_fn: Any,
        step: int,
    ) -> DataProto:
        """Return `data.train_batch_size` scored groups with different scores; `prompts` are used first, then `source`.

        There are fewer groups only if the limit of generation batches was reached.
        """
        data, filter_config = self._config.data, self._config.algorithm.filter_groups
        kept, uses = _KeptGroups(data.train_batch_size), Counter[str]()
        while True:
            batch_metrics: dict[str, float] = {}
            groups = with_unique_uids(prompts, uses)
            batch = generate_and_score(groups, batch_metrics)
            source.update_sampler(batch)
            uids = groups.non_tensor_batch["uid"]
            surplus_groups, equal_groups = kept.add(batch, uids, filter_config.metric, batch_metrics)
            if len(surplus_groups):
                source.put_back(prompts.select_idxs(surplus_groups))
            if len(equal_groups):
                source.reject(prompts.select_idxs(equal_groups))
            self._check_outage(kept, reward_fn)
            if self._is_finished(kept, source.batches_per_epoch):
                break
            prompts = source.next_batch()
        metrics |= kept.metrics()
        return self._build_batch(kept, step)

    def _check_outage(self, kept: _KeptGroups, reward_fn: Any) -> None:
        """Raise an error if no response of the last `trainer.max_nonfinite_steps` generation batches was scored.

        Unscored responses never differ: without this check, an outage of the reward function would cost an epoch and be
        reported as unsuitable data. Only for `on_error=mask`: `fail` raises earlier, and `zero` assigns scores.
        """
        max_batches = self._config.trainer.max_nonfinite_steps
        is_outage = kept.num_unscored_prompts >= max_batches * self._config.data.gen_batch_size
        if is_outage and getattr(reward_fn, "on_error", None) == "mask":
            raise no_samples_error(f"{max_batches} generation batches", getattr(reward_fn, "last_failure", None))

    def _is_finished(self, kept: _KeptGroups, batches_per_epoch: int) -> bool:
        """Return whether the step has all groups, has reached the limit of generation batches, or has generated an
        epoch of prompts without a single group: another epoch would not help."""
        # Limits are in prompts, not in batches: a GroupStream returns only as many prompts as are missing.
        gen_batch_size = self._config.data.gen_batch_size
        max_prompts = self._config.algorithm.filter_groups.max_num_gen_batches * gen_batch_size
        is_limit_reached = 0 < max_prompts <= kept.num_prompts
        epoch_without_group = kept.num_prompts_without_group >= batches_per_epoch * gen_batch_size
        return kept.num_missing == 0 or is_limit_reached or epoch_without_group

    def _build_batch(self, kept: _KeptGroups, step: int) -> DataProto:
        attempts = f"{kept.num_prompts} prompts in {kept.num_batches} generation batches"
        metric = self._config.algorithm.filter_groups.metric
        if not kept.parts:
            raise ValueError(
                f"algorithm.filter_groups: step {step} generated responses to {attempts}, and the responses to none of"
                f" them differ in {metric!r}: there is nothing to train on. Look at responses and scores"
                " (trainer.rollout_data_dir), choose another algorithm.filter_groups.metric, harder or easier data, or"
                " set algorithm.filter_groups.enable=False."
            )
        if kept.num_missing:
            logger.warning(
                "step %d trains on %d groups instead of %d: of %s, no others have responses that differ in %s"
                " (limit: algorithm.filter_groups.max_num_gen_batches)",
                step,
                kept.num_kept,
                kept.target,
                attempts,
                metric,
            )
        return concat_rows(kept.parts, self._pad_token_id)


@dataclass
class _KeptGroups:
    """The groups kept for one step so far, and statistics over all groups that were generated."""

    target: int
    """Number of groups to keep."""
    parts: list[DataProto] = field(default_factory=list)
    """The rows of the kept groups, one part per generation batch."""
    num_batches: int = 0
    num_prompts: int = 0
    num_differing: int = 0
    """Number of groups with different scores, kept or surplus."""
    num_kept: int = 0
    num_prompts_without_group: int = 0
    """Number of prompts since the last generation batch that had a group with different scores."""
    num_unscored_prompts: int = 0
    """Number of prompts of the latest consecutive generation batches in which no response could be scored."""
    scores: list[np.ndarray] = field(default_factory=list)
    dropped_scores: list[np.ndarray] = field(default_factory=list)
    batch_metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_missing(self) -> int:
        return self.target - self.num_kept

    def add(
        self, batch: DataProto, uids: np.ndarray, metric: str, metrics: dict[str, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep as many groups of a generation batch as are missing.

        `uids`: uid of each prompt of the batch. Returns the indices in `uids` of surplus groups, and of groups with
        equal scores.
        """
        row_uids = np.asarray(batch.non_tensor_batch["uid"])
        trajectory_uids = row_uids[Trajectories.of(batch).last_rows]
        differ = differing_trajectories(batch, trajectory_uids, metric)
        differing = np.flatnonzero(np.isin(uids.astype(str), trajectory_uids[differ].astype(str)))
        chosen, surplus = differing[: self.num_missing], differing[self.num_missing :]
        if len(chosen):
            self.parts.append(batch.select_idxs(np.isin(row_uids.astype(str), uids[chosen].astype(str))))
        self.num_batches += 1
        self.num_prompts += len(uids)
        self.num_differing += len(differing)
        self.num_kept += len(chosen)
        failed = batch.non_tensor_batch.get(FAILED_COLUMN)
        is_unscored = failed is not None and all(failed)
        self.num_unscored_prompts = self.num_unscored_prompts + len(uids) if is_unscored else 0
        self.num_prompts_without_group = 0 if len(differing) else self.num_prompts_without_group + len(uids)
        scores = trajectory_values(batch, "score", "algorithm.filter_groups.metric").numpy()
        self.scores.append(scores)
        self.dropped_scores.append(scores[~differ])
        for name, value in metrics.items():
            self.batch_metrics[name].append(value)
        return surplus, np.setdiff1d(np.arange(len(uids)), differing)

    def metrics(self) -> dict[str, float]:
        """Return means and sums over all groups that were generated.

        `filter_groups/kept_share` is the share of groups with different scores. It includes surplus groups, which
        `filter_groups/returned_prompts` counts. `filter_groups/dropped_groups`: number of groups with equal scores.
        """
        dropped = np.concatenate(self.dropped_scores)
        metrics = {
            name: float(sum(values) if name.startswith(_SUMMED_METRICS) else np.mean(values))
            for name, values in self.batch_metrics.items()
        }
        if len(dropped):
            metrics["filter_groups/dropped_score_mean"] = float(dropped.mean())
        return metrics | {
            "filter_groups/score_mean": float(np.concatenate(self.scores).mean()),
            "filter_groups/num_gen_batches": float(self.num_batches),
            "filter_groups/kept_share": self.num_differing / self.num_prompts,
            "filter_groups/dropped_groups": float(self.num_prompts - self.num_differing),
            "filter_groups/returned_prompts": float(self.num_differing - self.num_kept),
            "filter_groups/missing_prompts": float(self.num_missing),
        }


def differing_trajectories(batch: DataProto, trajectory_uids: np.ndarray, metric: str) -> np.ndarray:
    """Return for each trajectory whether the responses of its group differ in `metric`: bool [trajectories].

    `trajectory_uids`: the uid of the group of each trajectory. A trajectory without tokens belongs to no group.
    """
    values = trajectory_values(batch, metric, "algorithm.filter_groups.metric")
    return Groups(trajectory_uids, Trajectories.of(batch).mask).has_spread(values, _TOLERANCE).cpu().numpy()
