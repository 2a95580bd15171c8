"""Properties derived from a PPO configuration: roles and their layout, async mode, the source of old log-probs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from verl.config import names
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, count
from verl.config.rollout import RolloutConfig
from verl.config.schema import get_path
from verl.config.trainer import TrainerConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
ROUTER_REPLAY = f"{ACTOR}.router_replay.mode"
BLOCK_OF_ROLE = {
    "actor": ACTOR,
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward_model": "reward_model",
    "teacher": "distillation.teacher",
}
MODEL_OF_ROLE = {
    **dict.fromkeys(BLOCK_OF_ROLE, "actor_rollout_ref.model"),
    "critic": "critic.model",
    "reward_model": "reward_model.model",
}


@dataclass(frozen=True)
class Layout:
    """Layout of a role: the ranks of its pool, in data-parallel groups that each process their own rows."""

    pool: str
    world_size: int
    ranks_per_copy: int  # ranks of one data-parallel group; for FSDP the Ulysses size
    split: str  # parallel sizes of a group, e.g. "TP 4 × PP 2"
    ranks_per_sequence: int = 1  # ranks that share the tokens of each sequence; their token budgets add up

    @property
    def dp_size(self) -> int:
        return max(1, self.world_size // self.ranks_per_copy)

    def render(self) -> str:
        split = f" × {self.split}" if self.ranks_per_copy > 1 else ""
        return f"{count(self.world_size, 'rank')} of {self.pool} = data-parallel {self.dp_size}{split}"


def layout_of(config: PPOConfig, role: str) -> Layout:
    """Return the layout of a role (actor, rollout, ref, critic, reward_model, teacher)."""
    if role == "ref" and actor_is_reference(config):
        role = "actor"
    pool = config.role_mapping[role]
    world_size = max(1, sum(config.resource_pool_spec.get(pool, [1])))
    if role == "rollout":
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return Layout(pool, world_size, size, f"TP {size}")
    block = get_path(config, BLOCK_OF_ROLE[role])
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
    """Whether training and generation share devices."""
    return config.role_mapping["actor"] == config.role_mapping["rollout"]


def runs_in_own_process(rollout: RolloutConfig) -> bool:
    """Whether the rollout engine runs in its own processes on the devices of the workers."""
    return names.rollout_traits(rollout.name).third_party and not rollout.in_process and not rollout.server_urls


def needs_reference(config: PPOConfig) -> bool:
    """Whether a KL to the reference policy is used."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def actor_is_reference(config: PPOConfig) -> bool:
    """Whether the actor without adapters is the reference (LoRA): there is no separate role."""
    return config.actor_rollout_ref.model.lora_rank > 0


def scored_by_model(config: PPOConfig) -> bool:
    """Whether scores come from a reward model, in this run or at reward_model.url, not from a reward function."""
    reward = config.reward_model
    return reward.enable or (reward.url is not None and config.custom_reward_function.path is None)


def uses_custom_agent_loop(config: PPOConfig) -> bool:
    """Whether rows without `agent_name` run in a custom agent loop, which may return the score itself."""
    return config.actor_rollout_ref.rollout.agent.default_agent_loop not in names.AGENT_LOOPS


def serves_reward_model(config: PPOConfig) -> bool:
    """Whether this run serves its reward model over HTTP, for a judge or a custom reward function."""
    reward = config.reward_model
    return reward.enable and (reward.judge.enable or config.custom_reward_function.path is not None)


def reward_server_shares_devices(config: PPOConfig) -> bool:
    """Whether the served reward model shares devices with other roles; it is offloaded while idle."""
    others = {config.role_mapping[role] for role in active_roles(config) if role != "reward_model"}
    return serves_reward_model(config) and config.role_mapping["reward_model"] in others


def active_roles(config: PPOConfig) -> list[str]:
    """Return the roles that this run starts, in a fixed order."""
    active = {
        "actor": True,
        "rollout": True,
        "ref": needs_reference(config) and not actor_is_reference(config),
        "critic": config.critic.enable,
        "reward_model": config.reward_model.enable,
        "teacher": bool(config.distillation.local_teachers),
    }
    return [role for role, is_active in active.items() if is_active]


# ---------------------------------------------------------------- asynchronous mode


class AsyncSettings(NamedTuple):
    """Settings of an asynchronous mode."""

    max_staleness: int
    """Largest age of a response's oldest token, in training steps."""
    staleness_strategy: str
    """What happens to responses about to exceed `max_staleness`: "wait" for them, or "drop" and resample."""
    in_order: bool
    """Groups are trained in the order in which they were submitted."""
    partial_rollout: bool
    """Unfinished responses continue across weight syncs; else a weight sync waits for them."""


def async_settings(trainer: TrainerConfig) -> AsyncSettings:
    """Return the settings that `trainer.mode` implies. For mode sync they are those of async, but do not apply."""
    if trainer.mode == "one_step_off":
        return AsyncSettings(1, "wait", in_order=True, partial_rollout=False)
    # Without staleness, training equals that of mode sync, which also depends on the order.
    in_order = trainer.max_staleness == 0
    return AsyncSettings(trainer.max_staleness, trainer.staleness_strategy, in_order, trainer.partial_rollout)


def engine_pauses_in_updates(config: PPOConfig) -> bool:
    """Whether an in-process engine of one rank pauses from the start of an update to the weight sync."""
    rollout = config.actor_rollout_ref.rollout
    # Generation and updates alternate, and responses continue after the weight sync.
    is_alternating = not config.trainer.overlap and async_settings(config.trainer).partial_rollout
    is_third_party = names.rollout_traits(rollout.name).third_party
    return is_alternating and rollout.tensor_model_parallel_size == 1 and not is_third_party


def continues_responses(config: PPOConfig) -> bool:
    """Whether responses continue across weight syncs."""
    return config.trainer.mode == "async" and config.trainer.partial_rollout and config.trainer.max_staleness > 0


def can_free_partial_kv(config: PPOConfig) -> bool:
    """Whether the KV cache of responses that continue after an update may be freed during it."""
    is_native = config.actor_rollout_ref.rollout.name == "native"
    return continues_responses(config) and is_native and shares_devices(config) and engine_pauses_in_updates(config)


def frees_partial_kv(config: PPOConfig) -> bool:
    """Whether the KV cache of responses that continue after an update is freed during it, and computed again."""
    return can_free_partial_kv(config) and config.trainer.partial_kv == "recompute"


def resolve_partial_kv(config: PPOConfig) -> None:
    """Replace `trainer.partial_kv=auto` where memory does not matter. Where it does, the memory plan decides."""
    trainer = config.trainer
    if trainer.partial_kv != "auto" or can_free_partial_kv(config):
        return
    is_native = config.actor_rollout_ref.rollout.name == "native"
    # A native engine that is not paused in updates keeps its KV memory anyway.
    trainer.partial_kv = "keep" if continues_responses(config) and is_native else "recompute"


def resolve_asynchronous(config: PPOConfig, report: Report) -> None:
    """Set `rollout.mode=async` and the default of `trainer.overlap` for asynchronous modes."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.mode != "sync" and rollout.mode == "sync":
        rollout.mode = "async"
        report.notice(f"trainer.mode = {trainer.mode}: {ROLLOUT}.mode is set to async.")
    if trainer.overlap is None:
        # Alternating generation and updates keeps shared devices busy. But if a weight sync waits for all responses,
        # it would make the mode as slow as sync.
        trainer.overlap = not async_settings(trainer).partial_rollout


def check_loop_capacity(config: PPOConfig, report: Report) -> None:
    """Report a value of agent.max_concurrent_requests that leaves most of the engines' capacity unused."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    agent = rollout.agent
    if trainer.mode == "sync" or agent.default_agent_loop == names.SINGLE_TURN:
        return
    batch = config.data.train_batch_size * rollout.n
    slots = layout_of(config, "rollout").dp_size * rollout.max_num_seqs
    # The staleness limits the responses in flight, and the engines limit those that are decoded at a time.
    usable = min((async_settings(trainer).max_staleness + 1) * batch, slots)
    max_conversations = agent.num_workers * agent.max_concurrent_requests
    if 2 * max_conversations < usable:
        report.notice(
            f"{ROLLOUT}.agent.max_concurrent_requests = {agent.max_concurrent_requests}: {agent.num_workers} loop"
            f" workers run {max_conversations} conversations concurrently; the engines could decode {usable}. Set it to"
            " null (automatic), or raise it."
        )


# ---------------------------------------------------------------- old log-probs


def old_log_probs_from_update(config: PPOConfig) -> bool:
    """Whether the update's first forward pass provides old log-probs: as set; null: if there are no conflicts."""
    value = config.actor_rollout_ref.actor.old_log_prob_from_update
    return not old_log_prob_conflicts(config) if value is None else value


def old_log_prob_conflicts(config: PPOConfig) -> list[str]:
    """Return the reasons why the update cannot provide old log-probs.

    With one optimizer step per batch the policy is the old one during the whole update, so the ratio is 1, and the
    update can compute importance weights from its own log-probs. The remaining conflicts are consumers of old log-probs
    before the update.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    steps = actor.ppo_epochs * max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    reasons = []
    if steps > 1:
        reasons.append(
            f"{ACTOR}.ppo_mini_batch_size = {actor.ppo_mini_batch_size} and {ACTOR}.ppo_epochs = {actor.ppo_epochs}"
            f" take {steps} optimizer steps per batch, and only the first starts from the old policy"
        )
    if algorithm.use_kl_in_reward:
        reasons.append("algorithm.use_kl_in_reward = True reads them before the update")
    if config.distillation.enabled and config.distillation.distillation_loss.as_reward:
        reasons.append("distillation.distillation_loss.as_reward = True reads them before the update")
    if correction.bypass_mode:
        reasons.append(f"{CORRECTION}.bypass_mode = True uses the rollout's log-probs instead")
    if correction.rollout_rs is not None:
        reasons.append(f"{CORRECTION}.rollout_rs = {correction.rollout_rs} masks tokens before the update")
    if correction.rollout_is is not None and correction.rollout_is_batch_normalize:
        reasons.append(f"{CORRECTION}.rollout_is_batch_normalize = True needs the weights of the whole batch")
    return reasons
