"""Which roles a run has and where each runs: its pool, and how the ranks of the pool are cut into copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config import names
from verl.config.problems import count
from verl.config.schema import pick

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ROUTER_REPLAY = f"{ACTOR}.router_replay.mode"
BLOCK_OF_ROLE = {
    "actor": ACTOR,
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward_model": "reward_model",
    "teacher": "distillation.teacher",
}


@dataclass(frozen=True)
class Layout:
    """Where a role runs: the ranks of its pool, cut into groups that work on the same samples."""

    pool: str
    world_size: int
    ranks_per_copy: int
    split: str  # how the ranks of one copy are used, e.g. "TP 4 × PP 2"
    sharing: int = 1  # ranks that share the tokens of every sequence, and so add up their token budgets

    @property
    def dp_size(self) -> int:
        return max(1, self.world_size // self.ranks_per_copy)

    def render(self) -> str:
        split = f" × {self.split}" if self.ranks_per_copy > 1 else ""
        return f"{count(self.world_size, 'rank')} of {self.pool} = data-parallel {self.dp_size}{split}"


def layout_of(config: PPOConfig, role: str) -> Layout:
    """Pool and parallel sizes of a role (actor, rollout, ref, critic, reward_model, teacher)."""
    if role == "ref" and actor_is_reference(config):
        role = "actor"
    pool = config.role_mapping[role]
    world_size = max(1, sum(config.resource_pool_spec.get(pool, [1])))
    if role == "rollout":
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return Layout(pool, world_size, size, f"TP {size}")
    block = pick(config, BLOCK_OF_ROLE[role])
    if block.strategy == "megatron":
        sizes = block.megatron_config
        parts = {
            "TP": sizes.tensor_model_parallel_size,
            "PP": sizes.pipeline_model_parallel_size,
            "CP": sizes.context_parallel_size,
        }
        split = " × ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
        return Layout(pool, world_size, math.prod(parts.values()), split, sizes.context_parallel_size)
    size = block.ulysses_sequence_parallel_size
    return Layout(pool, world_size, size, f"Ulysses {size}", size)


def shares_devices(config: PPOConfig) -> bool:
    """Whether answers are generated where the policy is trained, by turns."""
    return config.role_mapping["actor"] == config.role_mapping["rollout"]


def needs_reference(config: PPOConfig) -> bool:
    """Whether some KL compares the policy with its reference."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def actor_is_reference(config: PPOConfig) -> bool:
    """With LoRA the actor's base weights are the reference: it has no role of its own."""
    return config.actor_rollout_ref.model.lora_rank > 0


def scored_by_model(config: PPOConfig) -> bool:
    """Scores are degrees that a reward model gives, here or behind reward_model.url, not verdicts of a function."""
    reward = config.reward_model
    return reward.enable or (reward.url is not None and config.custom_reward_function.path is None)


def runs_own_loop(config: PPOConfig) -> bool:
    """Whether rows without an `agent_name` run in the user's own agent loop, which may return the score itself."""
    return config.actor_rollout_ref.rollout.agent.default_agent_loop not in names.AGENT_LOOPS


def serves_reward_model(config: PPOConfig) -> bool:
    """The run's own reward model answers requests: those of a judge, or of a function of the user's."""
    reward = config.reward_model
    return reward.enable and (reward.judge.enable or config.custom_reward_function.path is not None)


def judge_shares_devices(config: PPOConfig) -> bool:
    """It does so on devices that other roles use too: parked while nobody is scored."""
    others = {config.role_mapping[role] for role in active_roles(config) if role != "reward_model"}
    return serves_reward_model(config) and config.role_mapping["reward_model"] in others


def active_roles(config: PPOConfig) -> list[str]:
    """The roles this run starts, in the order of the roles' table."""
    needed = {
        "actor": True,
        "rollout": True,
        "ref": needs_reference(config) and not actor_is_reference(config),
        "critic": config.critic.enable,
        "reward_model": config.reward_model.enable,
        "teacher": bool(config.distillation.local_teachers),
    }
    return [role for role, needs in needed.items() if needs]
