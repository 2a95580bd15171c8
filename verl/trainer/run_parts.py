"""The models that a run trains and saves: which folder of a step each has, and what a checkpoint of it must fit."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl.config import PPOConfig, SFTConfig
from verl.config.engine import CheckpointConfig, OptimConfig
from verl.utils.fs import resolve_model_path


@dataclass(frozen=True, eq=False)
class RunPart:
    """One trained model of a run."""

    folder: str
    """In a step: `actor`, `critic`, or `.` for the step itself."""
    key: str
    """The block of its model, as users write it."""
    kind: Any
    model: Any
    checkpoint: CheckpointConfig
    optim: OptimConfig
    strategy: str
    precision: str
    """In which matrices are multiplied, and the model for transformers is written."""
    limit: int | None
    """How many steps keep it."""

    @functools.cached_property
    def expected(self) -> Any:
        """What a checkpoint of it must fit; reads the config of the model, not its weights."""
        from verl.workers.engine.fsdp.expected import expected_model

        return expected_model(resolve_model_path(self.model.path, f"{self.key}.path"), self.kind, self.model)


def run_parts(config: PPOConfig | SFTConfig, worker_classes: Iterable[type] = ()) -> list[RunPart]:
    """The parts whose layout is known here: [] where a worker class is the user's own and may save as it likes."""
    if any(not cls.__module__.startswith("verl.") for cls in worker_classes):
        return []
    if isinstance(config, SFTConfig):
        parts = [_part(".", "model", "causal_lm", config, config.model, config.trainer.max_ckpt_to_keep)]
    else:
        policy, trainer = config.actor_rollout_ref, config.trainer
        limit = trainer.max_actor_ckpt_to_keep
        parts = [_part("actor", "actor_rollout_ref.model", "causal_lm", policy.actor, policy.model, limit)]
        if config.critic.enable:
            limit = trainer.max_critic_ckpt_to_keep
            parts.append(_part("critic", "critic.model", "value", config.critic, config.critic.model, limit))
    return [part for part in parts if part.strategy != "megatron"]


def _part(folder: str, key: str, kind: str, block: Any, model: Any, limit: int | None) -> RunPart:
    return RunPart(
        folder,
        key,
        kind,
        model,
        block.checkpoint,
        block.optim,
        block.strategy,
        block.fsdp_config.mixed_precision,
        limit,
    )
