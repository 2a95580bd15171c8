"""Validator: generate and score responses to the validation prompts, with metrics per data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from verl.algos.groups import Trajectories
from verl.config import PPOConfig
from verl.config.layout import scored_by_model
from verl.protocol import DataProto, object_array
from verl.trainer.common.dumps import ground_truths, response_texts, texts_of_batch
from verl.trainer.common.run_status import RunStatus
from verl.trainer.ppo.advantage import compute_response_mask
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.recorded_rows import DESCRIPTIONS
from verl.trainer.ppo.scoring import (
    Correctness,
    correct_flags,
    log_accuracy,
    response_scores,
    score_responses,
    unfinished_agents,
    with_turn_rewards,
)
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.utils.tracking import Tracking
from verl.workers.reward_manager.naive import FAILED_COLUMN
from verl.workers.reward_manager.scorer import error_metrics

Samples = dict[str, list[Any]]
"""Columns of scored responses."""

# Column with 1.0 for agents that failed or were aborted; only in batches with `agent_metrics`.
_UNFINISHED = "agent_failed"
# Statistics under `val-core`; spread and bounds are under `val-aux`.
_CORE = ("mean@", "best@", "maj@", "pass@")
_BOUNDS = ("/std", "/low", "/high")

BatchToBatch = Callable[[DataProto], DataProto]


class Validator:
    """Runs validations: generates with the trainer's generation phase, scores with the validation reward function."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        add_rm_scores: BatchToBatch,
        record: Callable[[Samples, Sequence[bool | None], int], None] = lambda samples, correct, step: None,
    ) -> None:
        """`add_rm_scores` adds the scores of the reward model to a batch, if the run has one.
        `record(samples, correct, step)` records scored responses."""
        self._config, self._tokenizer, self._groups = config, tokenizer, groups
        self._add_rm_scores, self._record = add_rm_scores, record

    def run(
        self,
        loader: Iterable[Any],
        generate: BatchToBatch,
        reward_fn: Any,
        step: int,
        status: RunStatus,
        tracking: Tracking,
    ) -> dict[str, float]:
        """Return metrics such as `val-core/<source>/<score>/mean@n`; log the accuracy per source and sampled responses.

        `generate` returns a response to every row of a batch.
        """
        batches = (DataProto.from_single_dict(rows) for rows in loader)
        samples = join_samples([self._generate_and_score(batch, generate, reward_fn, status) for batch in batches])
        self.show(samples, step, tracking)
        scores_are_continuous = scored_by_model(self._config)
        self._record(samples, sample_correctness(samples, scores_are_continuous), step)
        return sample_metrics(samples, scores_are_continuous)

    def show(self, samples: Samples, step: int, tracking: Tracking) -> None:
        """Log sampled responses to the trackers."""
        config, count = self._config.trainer, len(samples["uid"])
        order = np.random.default_rng(self._config.data.seed).permutation(count)[: config.log_val_generations]
        if len(order):
            texts, rewards = samples["response_text"], samples["reward"]
            chosen = [(texts[i].prompt, texts[i].response, rewards[i]) for i in order]
            tracking.log_generations(chosen, step, on_console=config.console_val_generations)

    def _generate_and_score(
        self, batch: DataProto, generate: BatchToBatch, reward_fn: Any, status: RunStatus
    ) -> Samples:
        """Generate and score one batch; return prompts, responses, `reward` and the extra columns of the reward."""
        n = self._config.actor_rollout_ref.rollout.val_kwargs.n
        batch = batch.repeat(n, interleave=True)
        batch.non_tensor_batch["sample_index"] = object_array([i % n for i in range(len(batch))])
        with status.phase("validation rollout", *self._groups.generation_groups):
            generated = generate(batch)
        with status.phase("validation reward", self._groups.reward_model):
            generated = self._add_rm_scores(generated)
            local = generated.fetch() if hasattr(generated, "fetch") else generated
            base_scores, extra = score_responses(local, reward_fn)
            scores = with_turn_rewards(base_scores, local)
        key, columns, trajectories = self._config.data.reward_fn_key, local.non_tensor_batch, Trajectories.of(local)
        rows = trajectories.last_rows
        texts = response_texts(texts_of_batch(local, self._tokenizer), trajectories, columns)
        extra_values = {name: [values[row] for row in rows] for name, values in extra.items()}
        if "num_turns" in columns:
            extra_values["num_turns"] = columns["num_turns"][rows].tolist()
        rewards = known_scores(trajectories.sum(scores.sum(-1)).tolist(), extra_values.get(FAILED_COLUMN), reward_fn)
        samples = extra_values | {
            "response_text": texts,
            "gts": ground_truths(local),
            "uid": columns["uid"][rows].tolist(),
            "data_source": columns[key][rows].tolist() if key in columns else ["unknown"] * len(trajectories),
            "reward": rewards,
            "answer_score": response_scores(base_scores.sum(-1), trajectories, extra.get(FAILED_COLUMN)),
            "sample_index": columns["sample_index"][rows].tolist() if "sample_index" in columns else [0] * len(rows),
            "length": trajectories.sum(compute_response_mask(local).sum(-1)).tolist(),
        }
        if "finish_reason" in columns:
            samples["finish_reason"] = columns["finish_reason"][rows].tolist()
        if "agent_metrics" in columns:
            samples |= with_unfinished(samples, unfinished_agents(local, trajectories), scored_by_model(self._config))
        return samples


def with_unfinished(samples: Samples, unfinished: Sequence[bool], scores_are_continuous: bool) -> Samples:
    """Return the columns `reward` and `acc` with `unfinished` agents (failed or aborted) as wrong, and `agent_failed`.

    The reward of an unfinished agent is 0; None with `scores_are_continuous`, since 0 has no meaning on the scale of a
    reward model.
    """
    failed_reward = None if scores_are_continuous else 0.0
    rewards = [
        failed_reward if failed else reward for reward, failed in zip(samples["reward"], unfinished, strict=True)
    ]
    columns: Samples = {"reward": rewards, _UNFINISHED: [float(failed) for failed in unfinished]}
    if "acc" in samples:
        pairs = zip(samples["acc"], unfinished, strict=True)
        columns["acc"] = [0.0 if failed else acc for acc, failed in pairs]
    return columns


def known_scores(scores: list[float], failed: Sequence[Any] | None, reward_fn: Any) -> list[float | None]:
    """Return the scores. If `reward_fn.on_error` is `mask`, samples that could not be scored have None."""
    if failed is None or getattr(reward_fn, "on_error", None) != "mask":
        return list(scores)
    return [None if missing else score for score, missing in zip(scores, failed, strict=True)]


def join_samples(parts: Sequence[Samples]) -> Samples:
    """Concatenate the columns of all batches; None for columns that a batch lacks (rewards differ by data source)."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [v for part in parts for v in part.get(name, [None] * len(part["uid"]))] for name in names}


def sample_metrics(samples: Samples, scores_are_continuous: bool) -> dict[str, float]:
    """Return the statistics of every score per data source, the accuracy where responses are right or wrong, and the
    number of responses that could not be scored (`val/reward/errors/timeout`, …)."""
    metrics = error_metrics(samples, "val/")
    infos = {name: column for name, column in samples.items() if name not in DESCRIPTIONS}
    for source, variables in process_validation_metrics(samples["data_source"], samples["uid"], infos).items():
        main = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            for name, value in values.items():
                core = variable == main and name.startswith(_CORE) and not name.endswith(_BOUNDS)
                metrics[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{name}"] = value
    correct: Correctness = defaultdict(list)
    for source, flag in zip(samples["data_source"], sample_correctness(samples, scores_are_continuous), strict=True):
        if flag is not None:
            correct[source].append(flag)
    log_accuracy(correct)
    return metrics | {f"val/{source}/accuracy": sum(flags) / len(flags) for source, flags in correct.items()}


def sample_correctness(samples: Samples, scores_are_continuous: bool) -> list[bool | None]:
    """Return whether each response is correct; None if it does not count (see `correct_responses`)."""
    unfinished = [bool(failed) for failed in samples.get(_UNFINISHED, ())]
    scores = samples.get("answer_score", samples["reward"])
    return correct_flags(samples["data_source"], scores, samples.get("acc"), scores_are_continuous, unfinished)
