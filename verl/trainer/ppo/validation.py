"""Validation: answers to the validation prompts, their scores per data source, a few of them shown."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.dumps import decode, write_jsonl
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.reward import compute_reward

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def validate(trainer: RayPPOTrainer) -> dict[str, float]:
    """Metrics `val-core/<source>/<score>/mean@n` and the like; logs accuracy per source and sampled answers."""
    samples: dict[str, list[Any]] = defaultdict(list)
    infos: dict[str, list[Any]] = defaultdict(list)
    trainer._hand_over_weights()
    for rows in trainer.val_dataloader:
        _score_batch(trainer, DataProto.from_single_dict(rows), samples, infos)
    _show(trainer, samples)
    metrics = {}
    by_source = process_validation_metrics(samples["data_source"], samples["uid"], dict(infos))
    for source, variables in by_source.items():
        for variable, values in variables.items():
            for name, value in values.items():
                core = variable == "acc" or (variable == "reward" and "acc" not in variables)
                kind = "val-core" if core and name.startswith(("mean@", "best@", "maj@")) else "val-aux"
                metrics[f"{kind}/{source}/{variable}/{name}"] = float(value)
    for source in dict.fromkeys(samples["data_source"]):
        chosen = [score for score, own in zip(samples["score"], samples["data_source"], strict=True) if own == source]
        correct = sum(score >= 1.0 for score in chosen)
        metrics[f"val/{source}/accuracy"] = correct / len(chosen)
        logger.info("%s Correct: %d/%d, Accuracy: %.2f", source, correct, len(chosen), correct / len(chosen))
    return metrics


def _score_batch(
    trainer: RayPPOTrainer, batch: DataProto, samples: dict[str, list[Any]], infos: dict[str, list[Any]]
) -> None:
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["sample_index"] = object_array([i % n for i in range(len(batch))])
    answered = trainer._generate_rows(batch, validate=True)
    if trainer.use_rm:
        answered = answered.union(trainer._balanced(trainer.rm_wg.compute_rm_score, answered, "reward_model"))
    local = answered.fetch() if hasattr(answered, "fetch") else answered
    scores, extra = compute_reward(local, trainer.val_reward_fn)
    values = scores.sum(-1).tolist()
    samples["prompt"] += decode(trainer.tokenizer, local.batch["prompts"].tolist())
    samples["answer"] += decode(trainer.tokenizer, local.batch["responses"].tolist())
    samples["score"] += values
    samples["uid"] += local.non_tensor_batch["uid"].tolist()
    key = trainer.config.data.reward_fn_key
    samples["data_source"] += (
        local.non_tensor_batch[key].tolist() if key in local.non_tensor_batch else ["unknown"] * len(local)
    )
    infos["reward"] += values
    for name, column in extra.items():
        # `pred` is the extracted answer: a text, on which the majority votes.
        if name == "pred" or all(isinstance(value, int | float | np.number) for value in column):
            infos[name] += list(column)


def _show(trainer: RayPPOTrainer, samples: dict[str, list[Any]]) -> None:
    """Sampled answers to the trackers; all of them to JSONL where a folder is set."""
    config, step = trainer.config.trainer, trainer.global_steps
    rows = [
        {"input": prompt, "output": answer, "score": score}
        for prompt, answer, score in zip(samples["prompt"], samples["answer"], samples["score"], strict=True)
    ]
    if config.log_val_generations and rows:
        order = np.random.default_rng(trainer.config.data.seed).permutation(len(rows))[: config.log_val_generations]
        chosen = [(rows[i]["input"], rows[i]["output"], rows[i]["score"]) for i in order]
        trainer.tracking.log_generations(chosen, step)
    if config.validation_data_dir is not None:
        write_jsonl(({"step": step, **row} for row in rows), Path(config.validation_data_dir) / f"{step}.jsonl")
