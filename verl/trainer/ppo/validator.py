"""Validator: generate and score responses to the validation prompts, with metrics per data source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.algos.trajectories import Trajectories
from verl.config import PPOConfig
from verl.config.layout import scored_by_model
from verl.protocol import DataProto, object_array
from verl.trainer.common.dumps import answer_texts, beside_ours, ground_truths, write_jsonl
from verl.trainer.common.failures import NonFatalFailures
from verl.trainer.common.status_line import StatusLine
from verl.trainer.ppo.groups import WorkerGroups
from verl.trainer.ppo.reward import (
    answer_scores,
    right_answers,
    say_right,
    score_answers,
    unfinished_agents,
    with_turn_rewards,
)
from verl.trainer.ppo.validation_metrics import process_validation_metrics
from verl.utils.tracking import Tracking
from verl.workers.reward_manager.naive import FAILED

Samples = dict[str, list[Any]]
"""Columns of scored responses."""

# Columns that describe a sample; all other columns are scores.
_DESCRIPTIONS = ("prompt", "answer", "gts", "more", "uid", "data_source", "answer_score")
# Column with 1.0 for agents that failed or were aborted; only in batches with `agent_metrics`.
_UNFINISHED = "agent_failed"
# Statistics under `val-core`; spread and bounds are under `val-aux`.
_CORE = ("mean@", "best@", "maj@", "pass@")
_BOUNDS = ("/std", "/low", "/high")

BatchToBatch = Callable[[DataProto], DataProto]


class Validator:
    """Runs validation with the generation phase of training and the reward function of validation."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        judge: BatchToBatch,
        failures: NonFatalFailures,
    ) -> None:
        """`judge` adds the scores of the reward model to a batch, if the run has one."""
        self._config, self._tokenizer, self._groups = config, tokenizer, groups
        self._judge, self._failures = judge, failures

    def run(
        self,
        loader: Iterable[Any],
        generate: BatchToBatch,
        reward_fn: Any,
        step: int,
        status: StatusLine,
        tracking: Tracking,
    ) -> dict[str, float]:
        """Return metrics such as `val-core/<source>/<score>/mean@n`; log the accuracy per source and sampled responses.

        `generate` returns a response to every row of a batch.
        """
        batches = (DataProto.from_single_dict(rows) for rows in loader)
        samples = joined([self._answered(batch, generate, reward_fn, status) for batch in batches])
        self.show(samples, step, tracking)
        return sample_metrics(samples, judged=scored_by_model(self._config))

    def show(self, samples: Samples, step: int, tracking: Tracking) -> None:
        """Log sampled responses to the trackers; write all of them to JSONL if a folder is set."""
        config = self._config.trainer
        own = {"input": "prompt", "output": "answer", "gts": "gts", "score": "reward"}
        rows = _rows({name: samples[column] for name, column in own.items()})
        if config.log_val_generations and rows:
            order = np.random.default_rng(self._config.data.seed).permutation(len(rows))[: config.log_val_generations]
            chosen = [(rows[i]["input"], rows[i]["output"], rows[i]["score"]) for i in order]
            tracking.log_generations(chosen, step, on_console=config.console_val_generations)
        if (folder := config.validation_data_dir) is not None:
            more = samples.get("more", [{}] * len(rows))
            names = ("data_source", "uid", *(name for name in samples if name not in (*_DESCRIPTIONS, "reward")))
            said = _rows(beside_ours({name: samples[name] for name in names}))
            dumped = [{"step": step, **row, **texts, **rest} for row, texts, rest in zip(rows, more, said, strict=True)]
            write = functools.partial(write_jsonl, dumped, Path(folder) / f"{step}.jsonl")
            if config.val_only:  # the files are the purpose of such a run: failures are fatal
                write()
            else:
                self._failures.dump("trainer.validation_data_dir", folder, step, write)

    def _answered(self, batch: DataProto, generate: BatchToBatch, reward_fn: Any, status: StatusLine) -> Samples:
        """Generate and score one batch; return prompts, responses, `reward` and the extra columns of the reward."""
        n = self._config.actor_rollout_ref.rollout.val_kwargs.n
        batch = batch.repeat(n, interleave=True)
        batch.non_tensor_batch["sample_index"] = object_array([i % n for i in range(len(batch))])
        with status.phase("validation rollout", *self._groups.answering):
            answered = generate(batch)
        with status.phase("validation reward", self._groups.reward_model):
            answered = self._judge(answered)
            local = answered.fetch() if hasattr(answered, "fetch") else answered
            base_scores, extra = score_answers(local, reward_fn)
            scores = with_turn_rewards(base_scores, local)
        key, columns, whole = self._config.data.reward_fn_key, local.non_tensor_batch, Trajectories.of(local)
        ends = whole.last_rows
        texts = answer_texts(local, self._tokenizer)
        said = {name: [values[row] for row in ends] for name, values in extra.items()}
        if "num_turns" in columns:
            said["num_turns"] = columns["num_turns"][ends].tolist()
        rewards = known_scores(whole.sum(scores.sum(-1)).tolist(), said.get(FAILED), reward_fn)
        samples = said | {
            "prompt": [text.pop("input") for text in texts],
            "answer": [text.pop("output") for text in texts],
            "gts": ground_truths(local),
            "more": texts,
            "uid": columns["uid"][ends].tolist(),
            "data_source": columns[key][ends].tolist() if key in columns else ["unknown"] * len(whole),
            "reward": rewards,
            "answer_score": answer_scores(base_scores.sum(-1), whole, extra.get(FAILED)),
        }
        if "agent_metrics" in columns:
            samples |= with_unfinished(samples, unfinished_agents(local, whole), scored_by_model(self._config))
        return samples


def _rows(columns: Samples) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def with_unfinished(samples: Samples, unfinished: Sequence[bool], judged: bool) -> Samples:
    """`reward` and `acc` with agents that failed or were aborted as wrong, and the column `agent_failed`.

    Their reward is 0, or None with a reward model (`judged`): 0 has no meaning on its scale.
    """
    failed_reward = None if judged else 0.0
    rewards = [
        failed_reward if failed else reward for reward, failed in zip(samples["reward"], unfinished, strict=True)
    ]
    columns: Samples = {"reward": rewards, _UNFINISHED: [float(failed) for failed in unfinished]}
    if "acc" in samples:
        pairs = zip(samples["acc"], unfinished, strict=True)
        columns["acc"] = [0.0 if failed else acc for acc, failed in pairs]
    return columns


def known_scores(scores: list[float], failed: Sequence[Any] | None, reward_fn: Any) -> list[float | None]:
    """Return the scores, with None for samples that failed to be scored if `on_error` is `mask`."""
    if failed is None or getattr(reward_fn, "on_error", None) != "mask":
        return list(scores)
    return [None if missing else score for score, missing in zip(scores, failed, strict=True)]


def joined(parts: Sequence[Samples]) -> Samples:
    """Concatenate the columns of all batches; None for columns that a batch lacks (rewards differ by data source)."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [v for part in parts for v in part.get(name, [None] * len(part["uid"]))] for name in names}


def sample_metrics(samples: Samples, judged: bool) -> dict[str, float]:
    """Return the statistics of every score per data source, and the accuracy where responses are right or wrong."""
    metrics, infos = {}, {name: column for name, column in samples.items() if name not in _DESCRIPTIONS}
    for source, variables in process_validation_metrics(samples["data_source"], samples["uid"], infos).items():
        main = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            for name, value in values.items():
                core = variable == main and name.startswith(_CORE) and not name.endswith(_BOUNDS)
                metrics[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{name}"] = value
    unfinished = [bool(failed) for failed in samples.get(_UNFINISHED, ())]
    scores = samples.get("answer_score", samples["reward"])
    right = right_answers(samples["data_source"], scores, samples.get("acc"), judged, unfinished)
    say_right(right)
    return metrics | {f"val/{source}/accuracy": sum(answers) / len(answers) for source, answers in right.items()}
