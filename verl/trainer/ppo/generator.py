"""Generator: generates responses to prompts and scores them; RewardOverlap: scores responses as they finish, while
others are still generated."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from verl.algos import takes_argument
from verl.algos.groups import Trajectories
from verl.config import PPOConfig
from verl.config.layout import ROLLOUT, reward_server_shares_devices, scored_by_model, serves_reward_model
from verl.protocol import DataProto, object_array
from verl.trainer.common.dumps import decode
from verl.trainer.ppo.rollout_jobs import FinishedTrajectory, OnFinished, trajectory_names
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.trainer.ppo.row_balancing import local_columns, select_columns_for
from verl.trainer.ppo.scoring import (
    NoRewards,
    ToolUseCheck,
    agent_metrics,
    log_step_accuracy,
    require_some_finished,
    reward_metrics,
    score_responses,
    spread_extra_fields,
    with_turn_rewards,
)
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.types.schema import columns_read_by
from verl.workers.reward_manager.naive import ROW_COLUMN
from verl.workers.rollout.prompts import response_end_tokens, with_row_names

logger = logging.getLogger(__name__)

# Column of the generation request: False for rows that are generated greedily.
_DO_SAMPLE = "do_sample"
Retry = Callable[[Callable[[], Any]], Any]
Infer = Callable[[Callable[..., Any], DataProto, str], DataProto]


class Generator:
    """Generates with a RolloutManager; scores with reward functions and/or a reward model."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        rollouts: RolloutManager,
        reward_fn: Any,
        infer: Infer,
    ) -> None:
        """`infer(method, batch, role)`: a forward pass of a worker group over a batch, like `WorkerGroups.infer`."""
        self._config, self._tokenizer, self._groups, self._infer = config, tokenizer, groups, infer
        self._rollouts = rollouts
        self._uses_rewards = config.distillation.scores_responses
        self.reward_fn = reward_fn if self._uses_rewards else NoRewards()
        self._has_reward_model = Role.RewardModel in groups.roles and not serves_reward_model(config)
        self._scores_are_continuous = scored_by_model(config) or not self._uses_rewards
        """Scores do not tell right from wrong: a response counts as correct only by the value `acc`."""
        self._needs_greedy = takes_argument(config.algorithm.adv_estimator, "reward_baselines")
        devices_busy = self._has_reward_model or reward_server_shares_devices(config)
        self._overlap = RewardOverlap(config.reward_model.overlap and not devices_busy)
        self._failed_in_a_row = 0
        self.reward_names: dict[str, None] = {}
        """Columns that reward functions have returned so far."""
        self._tool_use = ToolUseCheck(config.actor_rollout_ref.rollout, config.do_search)

    def start(self) -> None:
        """Determine the end tokens of responses, and log them."""
        policy, data = self._config.actor_rollout_ref, self._config.data
        template = data.apply_chat_template_kwargs
        self._end_token_ids = response_end_tokens(policy.model, policy.rollout, self._tokenizer, template)

    def rollout_rows(self, prompts: DataProto) -> DataProto:
        """Return the rows to generate: `rollout.n` adjacent rows per prompt, plus a greedy row if the estimator needs a
        greedy baseline."""
        return rollout_rows(prompts, self._config.actor_rollout_ref.rollout.n, self._needs_greedy)

    @property
    def responses_per_prompt(self) -> int:
        """Number of rows per prompt in `rollout_rows`."""
        return self._config.actor_rollout_ref.rollout.n + self._needs_greedy

    def generate(self, batch: DataProto, step: int, validate: bool, reward_fn: Any, retry: Retry) -> DataProto:
        """Return a response to every row; `reward_fn` scores finished responses while others are generated.

        `retry(call)` returns `call()`, and restarts lost workers and repeats the call if it fails.
        """
        request = self.request(batch, step, validate)
        with self._overlap(reward_fn, batch) as on_finished:
            generated = self._rollouts.generate(request, request.meta_info, on_finished, retry)
        return self.join_prompt_columns(batch, generated, validate)

    def request(self, batch: DataProto, step: int, validate: bool) -> DataProto:
        """Return the columns of these rows that generation reads, with `meta` as `meta_info`."""
        request = self._request_columns(batch)
        request.meta_info = self.meta(step, validate)
        return request

    def meta(self, step: int, validate: bool) -> dict[str, Any]:
        """Return the `meta_info` of a generation: the parameters common to all its rows."""
        return {
            "step": step,
            "seed": self._config.actor_rollout_ref.rollout.seed,
            "validate": validate,
            # Dynamic sampling concatenates generated batches: their columns must have the same width.
            "pad_to_max": not validate and self._config.algorithm.filter_groups.enable,
            "eos_token_id": self._end_token_ids,
            "pad_token_id": self._tokenizer.pad_token_id,
            "agent_columns": self._groups.agents is not None,
        }

    def join_prompt_columns(self, batch: DataProto, generated: DataProto, validate: bool) -> DataProto:
        """Return the generated rows with the columns of their prompts, which are the rows of `batch`."""
        if not validate:  # validation reports failed trajectories itself
            # Counted over batches: in async mode, a batch may consist of a single prompt whose trajectories all fail.
            limit = self._config.data.train_batch_size * self.responses_per_prompt
            self._failed_in_a_row = require_some_finished(generated, self._failed_in_a_row, limit)
        rows = generated.union(batch.select_idxs(prompt_rows(batch, generated)).select([], None, []))
        spread_extra_fields(rows)
        return rows

    def early_scorer(self, columns: Mapping[str, np.ndarray]) -> Any:
        """Return a scorer that receives responses to rows with these object columns as they finish; None if responses
        are scored after generation."""
        return self._overlap.early_scorer(self.reward_fn, columns)

    def use_early_scores(self, rows: DataProto, scorers: Sequence[Any]) -> None:
        """Use the results of these scorers, one per prompt of `rows` in order, in the next `score`."""
        self._overlap.use(self.reward_fn, rows, scorers, self.responses_per_prompt)

    def _request_columns(self, batch: DataProto) -> DataProto:
        """Return the columns that generation reads: a few for engines, all object columns for agents."""
        if self._groups.agents is not None:
            tensors = select_columns_for(batch, "generate").batch.keys()
            return batch.select(list(tensors), None, [])
        if "agent_name" in batch.non_tensor_batch:
            raise ValueError(
                f"{ROLLOUT}.mode: sync, but the data has a column 'agent_name': agents run in loop workers."
                f" Set {ROLLOUT}.mode=async, or drop the column."
            )
        return select_columns_for(batch, "generate")

    def add_rm_scores(self, batch: DataProto) -> DataProto:
        """Add `rm_scores` [batch, response] if the run has a reward model, which scores the last row of every
        trajectory."""
        if not self._has_reward_model:
            return batch
        compute_scores, trajectories = self._groups.reward_model.compute_rm_score, Trajectories.of(batch)
        if trajectories.one_row_each:
            return batch.union(self._infer(compute_scores, batch, "reward_model"))
        last_rows = trajectories.last_rows
        scores = self._infer(compute_scores, batch.select_idxs(last_rows), "reward_model").batch["rm_scores"]
        rm_scores = torch.zeros(len(batch), batch.batch["response_mask"].shape[1])
        rm_scores[torch.from_numpy(last_rows), : scores.shape[1]] = scores
        batch.batch["rm_scores"] = rm_scores
        return batch

    def score(self, batch: DataProto, metrics: dict[str, float], step: int) -> DataProto:
        """Add `token_level_scores`, the score of each response on its last token (from a reward model and/or functions)
        plus turn rewards, and `answer_scores`, the score without turn rewards; update `metrics`."""
        batch = self.add_rm_scores(batch)
        local = local_columns(batch, columns_read_by("reward"))
        mask = local.batch["response_mask"].clone()
        base_scores, extra = score_responses(local, self.reward_fn)
        scores = with_turn_rewards(base_scores, local)
        scores = scores if self._uses_rewards else torch.zeros_like(scores)  # agents may have set scores
        metrics |= (tool_metrics := agent_metrics(local))
        self._tool_use.check(tool_metrics, lambda: decode(self._tokenizer, local.batch["responses"][:1].tolist())[0])
        if self._overlap.share is not None:
            metrics["reward/scored_while_generating"] = self._overlap.share
        if scored_again := getattr(self.reward_fn, "scored_again", 0):
            metrics["reward/scored_again"] = float(scored_again)
        batch.batch["token_level_scores"], batch.batch["answer_scores"] = scores, base_scores.sum(-1)
        if not torch.equal(mask, local.batch["response_mask"]):
            batch.batch["response_mask"] = local.batch["response_mask"]  # samples that could not be scored are masked
        self.reward_names |= dict.fromkeys(extra)
        for name, values in extra.items():
            batch.non_tensor_batch[name] = object_array(list(values))
        if self._needs_greedy:
            batch = split_off_baselines(batch)
        trajectories = Trajectories.of(batch)
        if self._needs_greedy:
            metrics["reward/greedy/mean"] = float(trajectories.at_last_row(batch.batch["reward_baselines"]).mean())
        log_step_accuracy(batch, extra, self._config.data.reward_fn_key, self._scores_are_continuous, step)
        last_rows = trajectories.last_rows
        metrics |= reward_metrics({name: batch.non_tensor_batch[name][last_rows].tolist() for name in extra})
        return batch


def rollout_rows(prompts: DataProto, n: int, greedy: bool) -> DataProto:
    """Return `n` adjacent rows per prompt, numbered by `sample_index`, followed by a greedy row if `greedy` is set."""
    copies = n + greedy
    if "uid" in prompts.non_tensor_batch:
        prompts = with_unique_uids(prompts, Counter())
    rows = prompts.repeat(copies, interleave=True)
    numbers = np.arange(len(rows)) % copies
    rows.non_tensor_batch["sample_index"] = object_array(numbers.tolist())
    if greedy:
        rows.non_tensor_batch[_DO_SAMPLE] = object_array((numbers < n).tolist())
    return rows


def prompt_rows(requested: DataProto, generated: DataProto) -> np.ndarray:
    """Return the index of the requested row for each generated row [generated]. A trajectory may have several rows."""
    if "trajectory" not in generated.non_tensor_batch:
        return np.arange(len(requested))
    names = zip(requested.non_tensor_batch["uid"], requested.non_tensor_batch["sample_index"], strict=True)
    row_of = {f"{uid}/{number}": row for row, (uid, number) in enumerate(names)}
    unknown = [name for name in generated.non_tensor_batch["trajectory"] if name not in row_of]
    if unknown:
        raise ValueError(f"rollout: trajectory {unknown[0]!r} belongs to none of the {len(requested)} requested rows.")
    return np.array([row_of[name] for name in generated.non_tensor_batch["trajectory"]])


def split_off_baselines(batch: DataProto) -> DataProto:
    """Return the sampled rows of a scored batch; `reward_baselines` [batch] is the score of their prompt's greedy
    response.

    A greedy response that could not be scored counts as 0: every baseline that is independent of the samples is
    unbiased, but has a different variance.
    """
    sampled = np.array(batch.pop(non_tensor_batch_keys=[_DO_SAMPLE]).non_tensor_batch[_DO_SAMPLE], dtype=bool)
    uids = np.asarray(batch.non_tensor_batch["uid"])
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    greedy_score: dict[str, float] = defaultdict(float)
    for row in np.flatnonzero(~sampled):  # sums over all rows of a trajectory
        greedy_score[uids[row]] += scores[row]
    kept = batch.select_idxs(sampled)
    kept.batch["reward_baselines"] = torch.tensor([greedy_score[uid] for uid in uids[sampled]])
    return kept


class RewardOverlap:
    """Scores trajectories while others are generated. Reward managers without `score_ahead` only score whole batches
    after generation."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.share: float | None = None
        """Share of the responses of the last generation that were submitted for scoring before it ended; None if
        overlap was not used."""

    def early_scorer(self, reward_fn: Any, columns: Mapping[str, np.ndarray]) -> Any:
        """Return a scorer that receives responses to rows with these columns as they finish; None if overlap is
        disabled or the reward manager does not support it."""
        supported = self._enabled and hasattr(reward_fn, "score_ahead")
        return reward_fn.score_ahead(columns) if supported else None

    def use(self, reward_fn: Any, batch: DataProto, scorers: Sequence[Any], size: int) -> None:
        """Make `reward_fn` use the results of these scorers, of `size` rows each, when it scores `batch`."""
        self.share = None
        if scorers and all(scorer is not None for scorer in scorers) and hasattr(reward_fn, "use_ahead"):
            batch.non_tensor_batch[ROW_COLUMN] = object_array(list(range(len(batch))))
            self.share = reward_fn.use_ahead(scorers, size) / max(1, len(batch))

    @contextmanager
    def __call__(self, reward_fn: Any, batch: DataProto) -> Iterator[OnFinished]:
        """Context of generating responses to `batch`. Yields a callback that submits finished trajectories for scoring.

        Adds a column of row numbers to the batch, by which the reward manager finds the scores later.
        """
        self.share = None
        scorer = self.early_scorer(reward_fn, batch.non_tensor_batch)
        if scorer is None:
            yield lambda finished: None
            return
        numbers = {name: number for number, name in enumerate(trajectory_names(with_row_names(batch)))}
        batch.non_tensor_batch[ROW_COLUMN] = object_array(list(range(len(batch))))
        lock, finished_count = threading.Lock(), 0  # collector threads call `score` concurrently

        def score(finished: Sequence[FinishedTrajectory]) -> None:
            nonlocal finished_count
            unscored = [item for item in finished if item.status == "finished" and item.score is None]
            try:
                with lock:
                    finished_count += len(finished)
                    if finished_count < len(batch):  # nothing is generated after the last response
                        scorer.add([(numbers[item.name], item.last_tokens) for item in unscored])
            except Exception as error:  # noqa: BLE001 - logged; the responses are scored after generation
                logger.warning("responses are not scored while others are generated: %r", error)

        try:
            yield score
        finally:
            self.share = scorer.submitted / max(1, len(batch))


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
