"""Validation: answers to the validation prompts, their scores per data source, a few of them shown."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import DataProto, object_array
from verl.trainer.common.dumps import decode, write_jsonl
from verl.trainer.ppo.correctness import right_answers, say_right
from verl.trainer.ppo.reward import compute_reward
from verl.trainer.ppo.validation_metrics import process_validation_metrics
from verl.workers.reward_manager.naive import FAILED

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer


def validate(trainer: RayPPOTrainer) -> dict[str, float]:
    """Metrics `val-core/<source>/<score>/mean@n` and the like; logs accuracy per source and sampled answers."""
    trainer._hand_over_weights()
    parts = [_answered(trainer, DataProto.from_single_dict(rows)) for rows in trainer.val_dataloader]
    samples = _joined(parts)
    _show(trainer, samples)
    infos = {name: column for name, column in samples.items() if name not in _DESCRIPTIONS}
    return _metrics(samples, infos) | _accuracies(samples, judged=trainer.use_rm)


# Columns of a sample that say what it is; all others say how good it is.
_DESCRIPTIONS = ("prompt", "answer", "uid", "data_source")
# What is worth a look first; the spread and the bounds of each are not.
_CORE = ("mean@", "best@", "maj@", "pass@")
_BOUNDS = ("/std", "/low", "/high")


def _answered(trainer: RayPPOTrainer, batch: DataProto) -> dict[str, list[Any]]:
    """Columns of one batch: what was asked and answered, `reward` and what the reward function said beside it."""
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["sample_index"] = object_array([i % n for i in range(len(batch))])
    with trainer.status.phase("validation rollout", trainer.rollout_wg):
        answered = trainer._generate_rows(batch, validate=True)
    with trainer.status.phase("validation reward", trainer.rm_wg):
        if trainer.use_rm:
            answered = answered.union(trainer._balanced(trainer.rm_wg.compute_rm_score, answered, "reward_model"))
        local = answered.fetch() if hasattr(answered, "fetch") else answered
        scores, extra = compute_reward(local, trainer.val_reward_fn)
    key, columns = trainer.config.data.reward_fn_key, local.non_tensor_batch
    return {name: list(values) for name, values in extra.items()} | {
        "prompt": decode(trainer.tokenizer, local.batch["prompts"].tolist()),
        "answer": decode(trainer.tokenizer, local.batch["responses"].tolist()),
        "uid": columns["uid"].tolist(),
        "data_source": columns[key].tolist() if key in columns else ["unknown"] * len(local),
        "reward": _known(scores.sum(-1).tolist(), extra.get(FAILED), trainer.val_reward_fn),
    }


def _known(scores: list[float], failed: Sequence[Any] | None, reward_fn: Any) -> list[float | None]:
    """None for a sample that could not be scored, where these are masked: it is neither right nor wrong."""
    if failed is None or getattr(reward_fn, "on_error", None) != "mask":
        return list(scores)
    return [None if missing else score for score, missing in zip(scores, failed, strict=True)]


def _joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """One list per column over all batches; None where a batch does not have it (rewards differ by data source)."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [v for part in parts for v in part.get(name, [None] * len(part["uid"]))] for name in names}


def _metrics(samples: dict[str, list[Any]], infos: dict[str, list[Any]]) -> dict[str, float]:
    metrics = {}
    for source, variables in process_validation_metrics(samples["data_source"], samples["uid"], infos).items():
        main = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            for name, value in values.items():
                core = variable == main and name.startswith(_CORE) and not name.endswith(_BOUNDS)
                metrics[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return metrics


def _accuracies(samples: dict[str, list[Any]], judged: bool) -> dict[str, float]:
    """The share of right answers per source, where right and wrong mean something."""
    right = right_answers(samples["data_source"], samples["reward"], samples.get("acc"), judged)
    say_right(right)
    return {f"val/{source}/accuracy": sum(answers) / len(answers) for source, answers in right.items()}


def _show(trainer: RayPPOTrainer, samples: dict[str, list[Any]]) -> None:
    """Sampled answers to the trackers; all of them to JSONL where a folder is set."""
    config, step = trainer.config.trainer, trainer.global_steps
    names = {"input": "prompt", "output": "answer", "score": "reward", "data_source": "data_source", "uid": "uid"}
    rows = [
        dict(zip(names, row, strict=True)) for row in zip(*(samples[column] for column in names.values()), strict=True)
    ]
    if config.log_val_generations and rows:
        order = np.random.default_rng(trainer.config.data.seed).permutation(len(rows))[: config.log_val_generations]
        chosen = [(rows[i]["input"], rows[i]["output"], rows[i]["score"]) for i in order]
        trainer.tracking.log_generations(chosen, step, on_console=config.console_val_generations)
    if (folder := config.validation_data_dir) is not None:
        write = functools.partial(write_jsonl, [{"step": step, **row} for row in rows], Path(folder) / f"{step}.jsonl")
        if config.val_only:  # they are what the run is for
            write()
        else:
            trainer.setbacks.dump("trainer.validation_data_dir", folder, step, write)
