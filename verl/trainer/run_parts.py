"""The models that a run trains and saves: which folder of a step each has, and what a checkpoint of it must fit."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl.config import PPOConfig, SFTConfig
from verl.config.engine import CheckpointConfig, OptimConfig
from verl.utils.fs import resolve_model_path


@dataclass(frozen=True)
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

    @functools.cached_property
    def expected(self) -> Any:
        """What a checkpoint of it must fit; reads the config of the model, not its weights."""
        from verl.workers.engine.fsdp.expected import expected_model

        return expected_model(resolve_model_path(self.model.path), self.kind, self.model)


def run_parts(config: PPOConfig | SFTConfig, worker_classes: Iterable[type] = ()) -> list[RunPart]:
    """The parts whose layout is known here: [] where a worker class is the user's own and may save as it likes."""
    if any(not cls.__module__.startswith("verl.") for cls in worker_classes):
        return []
    if isinstance(config, SFTConfig):
        parts = [RunPart(".", "model", "causal_lm", config.model, config.checkpoint, config.optim, config.strategy)]
    else:
        policy, critic = config.actor_rollout_ref, config.critic
        actor = policy.actor
        parts = [
            RunPart(
                "actor",
                "actor_rollout_ref.model",
                "causal_lm",
                policy.model,
                actor.checkpoint,
                actor.optim,
                actor.strategy,
            )
        ]
        if critic.enable:
            parts.append(
                RunPart(
                    "critic", "critic.model", "value", critic.model, critic.checkpoint, critic.optim, critic.strategy
                )
            )
    return [part for part in parts if part.strategy != "megatron"]
