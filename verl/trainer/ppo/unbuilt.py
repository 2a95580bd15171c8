"""What the configuration knows but this version does not do yet: refused before anything is loaded, all at once."""

from __future__ import annotations

from verl.config import ConfigError, PPOConfig
from verl.config.problems import Problem


def refuse_unbuilt(config: PPOConfig) -> None:
    """Raise ConfigError with every key that asks for something that is not built."""
    policy, problems = config.actor_rollout_ref, []

    def refuse(asked: bool, key: str, value: object, instead: str) -> None:
        if asked:
            problems.append(Problem(key, value, "is not built yet in this version", instead))

    blocks = {"actor_rollout_ref.actor": policy.actor, "critic": config.critic, "reward_model": config.reward_model}
    for name, block in blocks.items():
        refuse(block.strategy == "megatron", f"{name}.strategy", block.strategy, f"Set {name}.strategy=fsdp2")
    rollout = policy.rollout
    size = rollout.tensor_model_parallel_size
    one_device = size > 1 and rollout.name == "hf"
    refuse(one_device, "actor_rollout_ref.rollout.tensor_model_parallel_size", size, "Set it to 1, or use native")
    refuse(rollout.name not in ("native", "hf"), "actor_rollout_ref.rollout.name", rollout.name, "Set it to native")
    refuse(rollout.multi_turn.enable, "actor_rollout_ref.rollout.multi_turn.enable", True, "Set it to False")
    refuse(config.do_search, "do_search", True, "Set it to False")
    if problems:
        raise ConfigError(problems)
