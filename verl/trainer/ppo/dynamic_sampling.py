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

from verl.algos.groups import Groups
from verl.algos.trajectories import Trajectories
from verl.config import PPOConfig
from verl.protocol import DataProto, object_array
from verl.trainer.common.training_health import no_samples_error
from verl.trainer.ppo.advantage import trajectory_values
from verl.trainer.ppo.agent_columns import SUMMED_AGENT_METRICS
from verl.trainer.ppo.row_balancing import concat_rows
from verl.workers.reward_manager.naive import FAILED_COLUMN

logger = logging.getLogger(__name__)

# Scores with a smaller difference are equal.
_TOLERANCE = 1e-6
# Prefixes of metrics that are summed over generation batches; all others are averaged.
_SUMMED = ("reward/errors", *SUMMED_AGENT_METRICS)

GenerateAndScore = Callable[[DataProto, dict[str, float]], DataProto]
"""Returns scored responses to prompts, and adds their metrics to the dict."""


class PromptSource(Protocol):
    """Source of further prompts: PromptStream, or in async modes GroupStream, which has already generated responses."""

    @property
    def batches_per_epoch(self) -> int: ...

    def next_batch(self) -> DataProto: ...

    def put_back(self, prompts: DataProto) -> None: ...

    def reject(self, prompts: DataProto) -> None: ...

    def update_sampler(self, batch: DataProto) -> None: ...


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
        # Counted in prompts, not in batches: a GroupStream returns only as many prompts as are missing.
        max_prompts = filter_config.max_num_gen_batches * data.gen_batch_size
        max_unscored = self._config.trainer.max_nonfinite_steps
        while True:
            batch_metrics: dict[str, float] = {}
            groups = with_unique_uids(prompts, uses)
            batch = generate_and_score(groups, batch_metrics)
            source.update_sampler(batch)
            surplus, equal = kept.add(batch, groups.non_tensor_batch["uid"], filter_config.metric, batch_metrics)
            if len(surplus):
                source.put_back(prompts.select_idxs(surplus))
            if len(equal):
                source.reject(prompts.select_idxs(equal))
            # Unscored responses never differ: without this check, an outage of the reward would cost an epoch and be
            # reported as unsuitable data. Only needed for on_error=mask: `fail` raises, `zero` continues on purpose.
            is_outage = kept.unscored_prompts >= max_unscored * data.gen_batch_size
            if is_outage and getattr(reward_fn, "on_error", None) == "mask":
                raise no_samples_error(f"{max_unscored} generation batches", getattr(reward_fn, "last_failure", None))
            # Also without a limit: after a whole epoch without a single group, another epoch would not help.
            epoch_without_group = kept.prompts_without_group >= source.batches_per_epoch * data.gen_batch_size
            if kept.missing == 0 or 0 < max_prompts <= kept.prompts or epoch_without_group:
                break
            prompts = source.next_batch()
        metrics |= kept.metrics()
        return self._batch(kept, step)

    def _batch(self, kept: _KeptGroups, step: int) -> DataProto:
        tried = f"{kept.prompts} prompts in {kept.batches} generation batches"
        metric = self._config.algorithm.filter_groups.metric
        if not kept.parts:
            raise ValueError(
                f"algorithm.filter_groups: step {step} generated responses to {tried}, and the responses to none of"
                f" them differ in {metric!r}: there is nothing to train on. Look at responses and scores"
                " (trainer.rollout_data_dir), choose another algorithm.filter_groups.metric, harder or easier data, or"
                " set algorithm.filter_groups.enable=False."
            )
        if kept.missing:
            logger.warning(
                "step %d: %s gave %d of %d groups whose responses differ in %s; training continues with these groups"
                " (algorithm.filter_groups.max_num_gen_batches)",
                *(step, tried, kept.taken, kept.target, metric),
            )
        return concat_rows(kept.parts, self._pad_token_id)


@dataclass
class _KeptGroups:
    """The groups kept for one step so far, and statistics over all groups that were generated."""

    target: int
    """Number of groups to keep."""
    parts: list[DataProto] = field(default_factory=list)
    batches: int = 0
    prompts: int = 0
    differing: int = 0
    taken: int = 0
    prompts_without_group: int = 0
    """Number of prompts since the last group with different scores."""
    unscored_prompts: int = 0
    """Number of prompts of the latest consecutive generation batches in which no response could be scored."""
    scores: list[np.ndarray] = field(default_factory=list)
    dropped_scores: list[np.ndarray] = field(default_factory=list)
    batch_metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def missing(self) -> int:
        return self.target - self.taken

    def add(
        self, batch: DataProto, uids: np.ndarray, metric: str, metrics: dict[str, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep as many groups of a generation batch as are missing. Return the indices in `uids` (the prompts of the
        batch) of surplus groups, and of groups with equal scores."""
        row_uids = np.asarray(batch.non_tensor_batch["uid"])
        trajectory_uids = row_uids[Trajectories.of(batch).last_rows]
        differ = differing_trajectories(batch, trajectory_uids, metric)
        differing = np.flatnonzero(np.isin(uids.astype(str), trajectory_uids[differ].astype(str)))
        chosen, surplus = differing[: self.missing], differing[self.missing :]
        if len(chosen):
            self.parts.append(batch.select_idxs(np.isin(row_uids.astype(str), uids[chosen].astype(str))))
        self.batches += 1
        self.prompts += len(uids)
        self.differing += len(differing)
        self.taken += len(chosen)
        failed = batch.non_tensor_batch.get(FAILED_COLUMN)
        self.unscored_prompts = self.unscored_prompts + len(uids) if failed is not None and all(failed) else 0
        self.prompts_without_group = 0 if len(differing) else self.prompts_without_group + len(uids)
        scores = trajectory_values(batch, "score", "algorithm.filter_groups.metric").numpy()
        self.scores.append(scores)
        self.dropped_scores.append(scores[~differ])
        for name, value in metrics.items():
            self.batch_metrics[name].append(value)
        return surplus, np.setdiff1d(np.arange(len(uids)), differing)

    def metrics(self) -> dict[str, float]:
        """Return means and sums over all groups that were generated, and the share that was kept."""
        dropped = np.concatenate(self.dropped_scores)
        metrics = {
            name: float(sum(values) if name.startswith(_SUMMED) else np.mean(values))
            for name, values in self.batch_metrics.items()
        }
        if len(dropped):
            metrics["filter_groups/dropped_score_mean"] = float(dropped.mean())
        return metrics | {
            "filter_groups/score_mean": float(np.concatenate(self.scores).mean()),
            "filter_groups/num_gen_batches": float(self.batches),
            "filter_groups/kept_share": self.differing / self.prompts,
            "filter_groups/returned_prompts": float(self.differing - self.taken),
            "filter_groups/missing_prompts": float(self.missing),
        }


def differing_trajectories(batch: DataProto, uids: np.ndarray, metric: str) -> np.ndarray:
    """Return for each trajectory whether the responses of its group differ in `metric`: bool [trajectories].

    A trajectory without tokens belongs to no group.
    """
    values = trajectory_values(batch, metric, "algorithm.filter_groups.metric")
    return Groups(uids, Trajectories.of(batch).mask).has_spread(values, _TOLERANCE).cpu().numpy()


def with_unique_uids(prompts: DataProto, uses: Counter[str]) -> DataProto:
    """Return the prompts with a unique `uid` each: a prompt that occurs twice in a step (at the end of an epoch) forms
    two groups with different sampling noise. `uses`: occurrences per `uid` so far; updated."""
    uids = []
    for uid in map(str, prompts.non_tensor_batch["uid"]):
        uses[uid] += 1
        uids.append(uid if uses[uid] == 1 else f"{uid}~{uses[uid]}")
    unique = prompts.select()
    unique.non_tensor_batch["uid"] = object_array(uids)
    return unique
