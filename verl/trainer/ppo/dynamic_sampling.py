"""Dynamic sampling (DAPO, arXiv 2503.14476): a prompt whose answers all score the same is replaced by another one.

All right or all wrong, such a group has no advantage and teaches nothing. The step generates `data.gen_batch_size`
prompts at a time and keeps the groups that differ, until it has `data.train_batch_size` of them. Prompts kept beyond
that wait for the next step, which answers them again with its own weights. After
`algorithm.filter_groups.max_num_gen_batches` the step goes on with the groups it has.
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
from verl.trainer.common.guard import no_samples
from verl.trainer.ppo.advantage import value_per_answer
from verl.trainer.ppo.agent_metrics import COUNTED
from verl.trainer.ppo.arrange import concat_rows
from verl.workers.reward_manager.naive import FAILED

logger = logging.getLogger(__name__)

# Scores closer than this are the same score.
_TOLERANCE = 1e-6
# Metrics of a generation batch that are numbers of samples; all others are means.
_COUNTED = ("reward/errors", *COUNTED)


RollOut = Callable[[DataProto, dict[str, float]], DataProto]
"""Scored answers to prompts; metrics of theirs are added to the dict."""


class PromptSource(Protocol):
    """Where prompts come from: the data, or a stream that has their answers."""

    @property
    def batches_per_epoch(self) -> int: ...

    def take(self, count: int) -> DataProto: ...

    def put_back(self, prompts: DataProto) -> None: ...

    def reject(self, prompts: DataProto) -> None: ...

    def learn_from(self, batch: DataProto) -> None: ...


def fill_batch(
    prompts: DataProto,
    metrics: dict[str, float],
    roll_out: RollOut,
    source: PromptSource,
    reward_fn: Any,
    config: PPOConfig,
    step: int,
    pad_token_id: int,
) -> DataProto:
    """Scored answers to `data.train_batch_size` prompts whose groups differ; `prompts` are tried first.

    Fewer only where the limit came first.
    """
    data, rule = config.data, config.algorithm.filter_groups
    found, times = _Found(data.train_batch_size), Counter[str]()
    # A stream of answers gives only what is missing: limits are counted in prompts, a batch of them may be a few.
    most = rule.max_num_gen_batches * data.gen_batch_size
    while True:
        answers_metrics: dict[str, float] = {}
        groups = own_groups(prompts, times)
        batch = roll_out(groups, answers_metrics)
        source.learn_from(batch)
        surplus, dull = found.add(batch, groups.non_tensor_batch["uid"], rule.metric, answers_metrics)
        if len(surplus):
            source.put_back(prompts.select_idxs(surplus))
        if len(dull):
            source.reject(prompts.select_idxs(dull))
        if found.unscored_in_a_row >= config.trainer.max_nonfinite_steps * data.gen_batch_size:
            _stop_in_an_outage(config.trainer.max_nonfinite_steps, reward_fn)
        # Without a limit: a whole epoch that added no group will not do so a second time either.
        in_vain = found.prompts_in_vain >= source.batches_per_epoch * data.gen_batch_size
        if found.missing == 0 or 0 < most <= found.prompts or in_vain:
            break
        prompts = source.take(data.gen_batch_size)
    metrics |= found.metrics()
    return found.result(config, step, pad_token_id)


def _stop_in_an_outage(batches: int, reward_fn: Any) -> None:
    """Answers that nobody can score never differ: without this, an outage would cost an epoch and be called dull data.

    With on_error=zero or fail the user has said what becomes of them.
    """
    if getattr(reward_fn, "on_error", None) == "mask":
        raise no_samples(f"{batches} generation batches", getattr(reward_fn, "last_failure", None))


@dataclass
class _Found:
    """The groups found for one step so far."""

    wanted: int
    parts: list[DataProto] = field(default_factory=list)
    batches: int = 0
    prompts: int = 0
    differing: int = 0
    taken: int = 0
    prompts_in_vain: int = 0
    """Since the last group that differed."""
    unscored_in_a_row: int = 0
    """Prompts of generation batches of which not one answer could be scored."""
    scores: list[np.ndarray] = field(default_factory=list)
    dropped_scores: list[np.ndarray] = field(default_factory=list)
    per_batch: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def missing(self) -> int:
        return self.wanted - self.taken

    def add(
        self, batch: DataProto, uids: np.ndarray, metric: str, metrics: dict[str, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take what is missing from one generation batch; places in `uids` of prompts that were not needed any more,
        and of those whose answers do not differ."""
        row_uids = np.asarray(batch.non_tensor_batch["uid"])
        answer_uids = row_uids[Trajectories.of(batch).last_rows]
        differ = differing_answers(batch, answer_uids, metric)
        kept = np.flatnonzero(np.isin(uids.astype(str), answer_uids[differ].astype(str)))
        chosen, surplus = kept[: self.missing], kept[self.missing :]
        if len(chosen):
            self.parts.append(batch.select_idxs(np.isin(row_uids.astype(str), uids[chosen].astype(str))))
        self.batches += 1
        self.prompts += len(uids)
        self.differing += len(kept)
        self.taken += len(chosen)
        failed = batch.non_tensor_batch.get(FAILED)
        self.unscored_in_a_row = self.unscored_in_a_row + len(uids) if failed is not None and all(failed) else 0
        self.prompts_in_vain = 0 if len(kept) else self.prompts_in_vain + len(uids)
        scores = value_per_answer(batch, "score", "algorithm.filter_groups.metric").numpy()
        self.scores.append(scores)
        self.dropped_scores.append(scores[~differ])
        for name, value in metrics.items():
            self.per_batch[name].append(value)
        return surplus, np.setdiff1d(np.arange(len(uids)), kept)

    def metrics(self) -> dict[str, float]:
        """Means and counts over everything that was generated, and what became of it."""
        dropped = np.concatenate(self.dropped_scores)
        found = {
            name: float(sum(values) if name.startswith(_COUNTED) else np.mean(values))
            for name, values in self.per_batch.items()
        }
        if len(dropped):
            found["filter_groups/dropped_score_mean"] = float(dropped.mean())
        return found | {
            "filter_groups/score_mean": float(np.concatenate(self.scores).mean()),
            "filter_groups/num_gen_batches": float(self.batches),
            "filter_groups/kept_share": self.differing / self.prompts,
            "filter_groups/returned_prompts": float(self.differing - self.taken),
            "filter_groups/missing_prompts": float(self.missing),
        }

    def result(self, config: PPOConfig, step: int, pad_token_id: int) -> DataProto:
        """The step's batch."""
        tried = f"{self.prompts} prompts in {self.batches} generation batches"
        metric = config.algorithm.filter_groups.metric
        if not self.parts:
            raise ValueError(
                f"algorithm.filter_groups: step {step} tried {tried}, and for none of them do the answers differ in"
                f" {metric!r}: there is nothing to learn from. Look at answers and scores (trainer.rollout_data_dir),"
                " choose another algorithm.filter_groups.metric, harder or easier data, or set"
                " algorithm.filter_groups.enable=False."
            )
        if self.missing:
            logger.warning(
                "step %d: %s gave %d of %d groups that differ in %s; training goes on with these"
                " (algorithm.filter_groups.max_num_gen_batches)", step, tried, self.taken, self.wanted, metric,
            )  # fmt: skip
        return concat_rows(self.parts, pad_token_id)


def differing_answers(batch: DataProto, uids: np.ndarray, metric: str) -> np.ndarray:
    """[trajectories], bool: whether the answers of its group differ in `metric`; one without tokens is in no group."""
    values = value_per_answer(batch, metric, "algorithm.filter_groups.metric")
    return Groups(uids, Trajectories.of(batch).mask).differ(values, _TOLERANCE).cpu().numpy()


def own_groups(prompts: DataProto, times: Counter[str]) -> DataProto:
    """A prompt that comes again in one step, in a new epoch, is a group of its own with sampling noise of its own."""
    names = []
    for uid in map(str, prompts.non_tensor_batch["uid"]):
        times[uid] += 1
        names.append(uid if times[uid] == 1 else f"{uid}~{times[uid]}")
    own = prompts.select()
    own.non_tensor_batch["uid"] = object_array(names)
    return own
