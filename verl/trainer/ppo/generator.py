"""Generator: prompts become scored answers. Those that are finished are scored while others are still generated;
greedy baselines and dynamic sampling are part of it."""

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
from verl.algos.trajectories import Trajectories
from verl.config import PPOConfig
from verl.config.layout import ROLLOUT, judge_shares_devices, scored_by_model, serves_reward_model
from verl.protocol import DataProto, object_array
from verl.trainer.common.answer_ends import answer_ends
from verl.trainer.common.dumps import decode
from verl.trainer.ppo.agent_metrics import ToolUse, agent_metrics
from verl.trainer.ppo.agents import require_some_finished, spread_fields
from verl.trainer.ppo.dynamic_sampling import PromptSource, RollOut, fill_batch, own_groups
from verl.trainer.ppo.finished_rows import FinishedTrajectory
from verl.trainer.ppo.groups import WorkerGroups, local_columns, select_read_by
from verl.trainer.ppo.reward import NoRewards, reward_metrics, say_right_of_step, score_answers, with_turn_rewards
from verl.trainer.ppo.rollout_manager import OnFinished, RolloutManager, trajectory_names
from verl.trainer.ppo.utils import Role
from verl.types.schema import columns_read_by
from verl.workers.reward_manager.naive import ROW
from verl.workers.rollout.prompts import with_row_names

logger = logging.getLogger(__name__)

# A column of the generation request: False where a row is to be answered greedily.
SAMPLED = "do_sample"
Retry = Callable[[Callable[[], Any]], Any]
Infer = Callable[[Callable[..., Any], DataProto, str], DataProto]


class Generator:
    """Asks the rollout engines for answers and the reward functions, or a reward model, for their scores."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        rollouts: RolloutManager,
        reward_fn: Any,
        infer: Infer,
    ) -> None:
        """`infer(method, batch, role)` makes a group's pass over a batch, as `WorkerGroups.infer` does."""
        self._config, self._tokenizer, self._groups, self._infer = config, tokenizer, groups, infer
        self._rollouts = rollouts
        self._scores = config.distillation.scores_answers
        self.reward_fn = reward_fn if self._scores else NoRewards()
        self._has_judge = Role.RewardModel in groups.roles and not serves_reward_model(config)
        self._degrees = scored_by_model(config) or not self._scores
        self._greedy = takes_argument(config.algorithm.adv_estimator, "reward_baselines")
        busy = self._has_judge or judge_shares_devices(config)
        self._overlap = RewardOverlap(config.reward_model.overlap and not busy)
        self._unfinished = 0
        self._tool_use = ToolUse(config.actor_rollout_ref.rollout, config.do_search)

    def start(self) -> None:
        """Find what ends an answer, and say it."""
        policy, data = self._config.actor_rollout_ref, self._config.data
        template = data.apply_chat_template_kwargs
        self._end_token_ids = answer_ends(policy.model, policy.rollout, self._tokenizer, template)

    def answer_rows(self, prompts: DataProto) -> DataProto:
        """The rows to be answered: `rollout.n` of each prompt, together; for some estimators one more, greedily."""
        return answer_rows(prompts, self._config.actor_rollout_ref.rollout.n, self._greedy)

    @property
    def answers_per_prompt(self) -> int:
        """Rows that `answer_rows` gives for each."""
        return self._config.actor_rollout_ref.rollout.n + self._greedy

    def answer(self, batch: DataProto, step: int, validate: bool, reward_fn: Any, retry: Retry) -> DataProto:
        """Return a response to every row; `reward_fn` scores finished ones while others are generated.

        `retry(call)` calls again after it has restarted a lost worker.
        """
        request = self.request(batch, step, validate)
        if self._groups.rollout is not self._groups.actor:
            self._groups.replicas.require_all()
        with self._overlap(reward_fn, batch) as on_finished:
            generated = self._rollouts.generate(request, request.meta_info, on_finished, retry)
        return self.joined(batch, generated, validate)

    def request(self, batch: DataProto, step: int, validate: bool) -> DataProto:
        """What goes to whoever answers these rows."""
        request = self._request(batch)
        request.meta_info = self.meta(step, validate)
        return request

    def meta(self, step: int, validate: bool) -> dict[str, Any]:
        """What is to be known of a generation, beside its rows."""
        return {
            "step": step,
            "seed": self._config.actor_rollout_ref.rollout.seed,
            "validate": validate,
            # Generation batches are joined: their columns must be of one width.
            "pad_to_max": not validate and self._config.algorithm.filter_groups.enable,
            "eos_token_id": self._end_token_ids,
            "pad_token_id": self._tokenizer.pad_token_id,
            "agent_columns": self._groups.agents is not None,
        }

    def joined(self, batch: DataProto, generated: DataProto, validate: bool) -> DataProto:
        """The answers with the columns of the rows that they answer."""
        if not validate:  # a validation says itself what it could not measure
            # Of a stream a batch may be the one prompt that is still missing, and that one may always fail.
            enough = self._config.data.train_batch_size * self.answers_per_prompt
            self._unfinished = require_some_finished(generated, self._unfinished, enough)
        answers = generated.union(batch.select_idxs(answered_rows(batch, generated)).select([], None, []))
        spread_fields(answers)
        return answers

    def score_ahead(self, columns: Mapping[str, np.ndarray]) -> Any:
        """Where answers to rows with these object columns are scored as they are finished; None: after generation."""
        return self._overlap.ahead(self.reward_fn, columns)

    def scored_ahead(self, rows: DataProto, parts: Sequence[Any]) -> None:
        """The rows' answers are to be scored; `parts` are of the prompts they answer, in order, from `score_ahead`."""
        self._overlap.use(self.reward_fn, rows, parts, self.answers_per_prompt)

    def _request(self, batch: DataProto) -> DataProto:
        """What whoever answers reads: an engine a few columns, an agent all that its row has."""
        if self._groups.agents is not None:
            tensors = select_read_by(batch, "generate").batch.keys()
            return batch.select(list(tensors), None, [])
        if "agent_name" in batch.non_tensor_batch:
            raise ValueError(
                f"{ROLLOUT}.mode: sync, and the data has a column 'agent_name': agents need every sample to proceed on"
                f" its own. Set {ROLLOUT}.mode=async, or drop the column."
            )
        return select_read_by(batch, "generate")

    def judged(self, batch: DataProto) -> DataProto:
        """With the scores of the reward model, where there is one: it reads the last row of every trajectory."""
        if not self._has_judge:
            return batch
        judge, whole = self._groups.reward_model.compute_rm_score, Trajectories.of(batch)
        if whole.one_row_each:
            return batch.union(self._infer(judge, batch, "reward_model"))
        scores = self._infer(judge, batch.select_idxs(whole.last_rows), "reward_model").batch["rm_scores"]
        of_rows = torch.zeros(len(batch), batch.batch["response_mask"].shape[1])
        of_rows[torch.from_numpy(whole.last_rows), : scores.shape[1]] = scores
        batch.batch["rm_scores"] = of_rows
        return batch

    def score(self, batch: DataProto, metrics: dict[str, float], step: int) -> DataProto:
        """`token_level_scores`: the score of each answer on its last token, from a reward model and/or functions, plus
        turn rewards; `answer_scores`: the score without turn rewards."""
        batch = self.judged(batch)
        local = local_columns(batch, columns_read_by("reward"))
        mask = local.batch["response_mask"].clone()
        base_scores, extra = score_answers(local, self.reward_fn)
        scores = with_turn_rewards(base_scores, local)
        scores = scores if self._scores else torch.zeros_like(scores)  # agents may have given some
        metrics |= (of_agents := agent_metrics(local))
        self._tool_use.see(of_agents, lambda: decode(self._tokenizer, local.batch["responses"][:1].tolist())[0])
        if self._overlap.share is not None:
            metrics["reward/scored_while_generating"] = self._overlap.share
        if again := getattr(self.reward_fn, "scored_again", 0):
            metrics["reward/scored_again"] = float(again)
        batch.batch["token_level_scores"], batch.batch["answer_scores"] = scores, base_scores.sum(-1)
        if not torch.equal(mask, local.batch["response_mask"]):
            batch.batch["response_mask"] = local.batch["response_mask"]  # samples that could not be scored
        for name, values in extra.items():
            batch.non_tensor_batch[name] = object_array(list(values))
        if self._greedy:
            batch = split_off_baselines(batch)
        whole = Trajectories.of(batch)
        if self._greedy:
            metrics["reward/greedy/mean"] = float(whole.at_end(batch.batch["reward_baselines"]).mean())
        say_right_of_step(batch, extra, self._config.data.reward_fn_key, self._degrees, step)
        metrics |= reward_metrics({name: batch.non_tensor_batch[name][whole.last_rows].tolist() for name in extra})
        return batch

    def fill(
        self, prompts: DataProto, metrics: dict[str, float], roll_out: RollOut, source: PromptSource, step: int
    ) -> DataProto:
        """Dynamic sampling: as many prompts as the step wants whose answers differ, each asked by `roll_out`."""
        pad = self._tokenizer.pad_token_id
        return fill_batch(prompts, metrics, roll_out, source, self.reward_fn, self._config, step, pad)


def answer_rows(prompts: DataProto, n: int, greedy: bool) -> DataProto:
    """Each prompt `n` times, all its rows together and numbered by `sample_index`; with `greedy` once more, last."""
    copies = n + greedy
    if "uid" in prompts.non_tensor_batch:
        prompts = own_groups(prompts, Counter())
    rows = prompts.repeat(copies, interleave=True)
    numbers = np.arange(len(rows)) % copies
    rows.non_tensor_batch["sample_index"] = object_array(numbers.tolist())
    if greedy:
        rows.non_tensor_batch[SAMPLED] = object_array((numbers < n).tolist())
    return rows


def answered_rows(asked: DataProto, generated: DataProto) -> np.ndarray:
    """[generated]: which of the rows asked each generated row answers. A trajectory has as many as it needed."""
    if "trajectory" not in generated.non_tensor_batch:
        return np.arange(len(asked))
    names = zip(asked.non_tensor_batch["uid"], asked.non_tensor_batch["sample_index"], strict=True)
    row_of = {f"{uid}/{number}": row for row, (uid, number) in enumerate(names)}
    unasked = [name for name in generated.non_tensor_batch["trajectory"] if name not in row_of]
    if unasked:
        raise ValueError(f"rollout: trajectory {unasked[0]!r} answers none of the {len(asked)} rows that were asked.")
    return np.array([row_of[name] for name in generated.non_tensor_batch["trajectory"]])


def split_off_baselines(batch: DataProto) -> DataProto:
    """The sampled rows of a scored batch; `reward_baselines` [batch] is the score of their prompt's greedy answer.

    A greedy answer that could not be scored counts 0: any baseline that the samples do not influence is right, only not
    equally good.
    """
    sampled = np.array(batch.pop(non_tensor_batch_keys=[SAMPLED]).non_tensor_batch[SAMPLED], dtype=bool)
    uids = np.asarray(batch.non_tensor_batch["uid"])
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    greedy_score: dict[str, float] = defaultdict(float)
    for row in np.flatnonzero(~sampled):  # a trajectory's rows together
        greedy_score[uids[row]] += scores[row]
    kept = batch.select_idxs(sampled)
    kept.batch["reward_baselines"] = torch.tensor([greedy_score[uid] for uid in uids[sampled]])
    return kept


class RewardOverlap:
    """Around a generation. A manager of the user's own that scores whole batches only is left alone."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.share: float | None = None
        """Of the last generation's answers, those that were being scored when it ended; None: it was not watched."""

    def ahead(self, reward_fn: Any, columns: Mapping[str, np.ndarray]) -> Any:
        """Where answers to rows with these columns can be scored as they are finished; None where they cannot."""
        can = self._enabled and hasattr(reward_fn, "score_ahead")
        return reward_fn.score_ahead(columns) if can else None

    def use(self, reward_fn: Any, batch: DataProto, parts: Sequence[Any], size: int) -> None:
        """The batch to be scored next has been scored in `parts`, each of `size` rows."""
        self.share = None
        if parts and all(part is not None for part in parts) and hasattr(reward_fn, "use_ahead"):
            batch.non_tensor_batch[ROW] = object_array(list(range(len(batch))))
            self.share = reward_fn.use_ahead(parts, size) / max(1, len(batch))

    @contextmanager
    def __call__(self, reward_fn: Any, batch: DataProto) -> Iterator[OnFinished]:
        """Around the generation of the rows of `batch`; the callback scores trajectories as they finish.

        The batch gets a column that numbers the rows: by it the reward manager finds what it has scored already.
        """
        self.share = None
        ahead = self.ahead(reward_fn, batch.non_tensor_batch)
        if ahead is None:
            yield lambda finished: None
            return
        numbers = {name: number for number, name in enumerate(trajectory_names(with_row_names(batch)))}
        batch.non_tensor_batch[ROW] = object_array(list(range(len(batch))))
        lock, seen = threading.Lock(), 0  # hosts report concurrently

        def score(finished: Sequence[FinishedTrajectory]) -> None:
            nonlocal seen
            unscored = [one for one in finished if one.status == "finished" and one.score is None]
            try:
                with lock:
                    seen += len(finished)
                    if seen < len(batch):  # the last ones have no generation to overlap with
                        ahead.add([(numbers[one.name], one.last_tokens) for one in unscored])
            except Exception as error:  # noqa: BLE001 - logged; these are scored after the generation
                logger.warning("responses are not scored while others are generated: %r", error)

        try:
            yield score
        finally:
            self.share = ahead.submitted / max(1, len(batch))
