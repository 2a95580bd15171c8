"""The batch plan: how the prompts of a training step become samples, mini-batches and micro-batches on each rank.

The log shows the plan, and validation reports its problems, so that both use the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config.layout import (
    ACTOR,
    BLOCK_OF_ROLE,
    ROLLOUT,
    Layout,
    active_roles,
    actor_is_reference,
    layout_of,
    needs_reference,
    serves_reward_model,
)
from verl.config.names import loss_traits
from verl.config.problems import Problem, count, divisors, near_values
from verl.config.roles import ActorConfig
from verl.config.schema import get_path

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig

FSDP_IS_FSDP2 = "strategy fsdp is the same engine as fsdp2 (torch's fully_shard)"


@dataclass(frozen=True)
class UpdatePlan:
    """Batches of a role that is trained (actor, critic) in one training step."""

    role: str
    layout: Layout
    samples_per_rank: int
    mini_batches: int
    mini_batch_prompts: int
    mini_batch_samples: int
    mini_batch_samples_per_rank: int
    micro_batch_size: int | None  # samples per rank; None with a token budget
    micro_batches: int | None  # per mini-batch and rank; None with a token budget
    token_budget: int | None  # tokens per rank and micro-batch; None with a fixed size
    epochs: int
    optimizer_steps: int  # per training step

    def render(self) -> str:
        """Return one line for the log."""
        if self.token_budget is None:
            micro = f"{count(self.micro_batches or 0, 'micro-batch')} of {count(self.micro_batch_size or 0, 'sample')}"
        else:
            micro = f"micro-batches of up to {self.token_budget} tokens"
        return (
            f"{self.layout.render()}; "
            f"{count(self.mini_batches, 'mini-batch')} of {count(self.mini_batch_prompts, 'prompt')} "
            f"({count(self.mini_batch_samples, 'sample')}, {self.mini_batch_samples_per_rank} per rank in {micro}) "
            f"× {count(self.epochs, 'epoch')} = {count(self.optimizer_steps, 'optimizer step')}"
        )


@dataclass(frozen=True)
class InferPlan:
    """Batches of a role that only runs forward passes (reference, reward model, teachers) in one training step."""

    role: str
    layout: Layout
    samples_per_rank: int
    micro_batch_size: int | None  # samples per rank; None with a token budget
    token_budget: int | None  # tokens per rank and micro-batch; None with a fixed size
    is_actor: bool  # the reference of a LoRA run is the actor without adapters

    def render(self) -> str:
        """Return one line for the log."""
        if self.token_budget is None:
            size = self.micro_batch_size or 1
            micro = f"{count(math.ceil(self.samples_per_rank / size), 'micro-batch')} of {count(size, 'sample')}"
        else:
            micro = f"micro-batches of up to {self.token_budget} tokens"
        prefix = "the actor without adapters, " if self.is_actor else ""
        return f"{prefix}{self.layout.render()}; {count(self.samples_per_rank, 'sample')} per rank in {micro}"


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes and layouts of one training step, and their problems."""

    prompts: int
    n: int
    samples: int
    max_tokens_per_sample: int
    pools: dict[str, int]
    rollout: Layout
    rollout_engine: str
    rollout_replicas: int
    samples_per_replica: int
    actor: UpdatePlan
    loss: str
    critic: UpdatePlan | None
    reference: InferPlan | None
    reward_model: InferPlan | None
    teacher: InferPlan | None
    strategies: tuple[str, ...]
    problems: tuple[Problem, ...]

    def render(self) -> str:
        """Return a few lines for the log."""
        pools = ", ".join(f"{name} of {count(size, 'rank')}" for name, size in self.pools.items())
        rows = [
            (
                "step",
                f"{count(self.prompts, 'prompt')} × {count(self.n, 'response')} = {count(self.samples, 'sample')} "
                f"of up to {self.max_tokens_per_sample} tokens",
            ),
            ("pools", pools),
            (
                "rollout",
                f"{self.rollout_engine}: {count(self.rollout_replicas, 'replica')} × TP {self.rollout.ranks_per_copy} "
                f"on {self.rollout.pool}, {count(self.samples_per_replica, 'sample')} each",
            ),
            ("actor", self.actor.render()),
            ("loss", self.loss),
        ]
        others = {"critic": self.critic, "ref": self.reference, "reward": self.reward_model, "teacher": self.teacher}
        for name, plan in others.items():
            if plan is not None:
                rows.append((name, plan.render()))
        if "fsdp" in self.strategies:
            rows.append(("engine", FSDP_IS_FSDP2))
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Batch plan", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def batch_plan(config: PPOConfig) -> BatchPlan:
    """Return the plan of a resolved configuration. Errors do not raise: they are in `problems`."""
    problems: list[Problem] = []
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    samples = prompts * n
    rollout = layout_of(config, "rollout")
    problems += _layout_problems(config)
    actor = _update_plan(config, "actor", problems)
    critic = _update_plan(config, "critic", problems) if config.critic.enable else None
    return BatchPlan(
        prompts=prompts,
        n=n,
        samples=samples,
        max_tokens_per_sample=config.data.max_prompt_length + config.data.max_response_length,
        pools={name: sum(sizes) for name, sizes in config.resource_pool_spec.items()},
        rollout=rollout,
        rollout_engine=config.actor_rollout_ref.rollout.name,
        rollout_replicas=rollout.dp_size,
        samples_per_replica=math.ceil(samples / rollout.dp_size),
        actor=actor,
        loss=_loss_line(config.actor_rollout_ref.actor),
        critic=critic,
        reference=_infer_plan(config, "ref") if needs_reference(config) else None,
        reward_model=_infer_plan(config, "reward_model")
        if config.reward_model.enable and not serves_reward_model(config)
        else None,
        teacher=_infer_plan(config, "teacher") if config.distillation.local_teachers else None,
        strategies=tuple(
            get_path(config, BLOCK_OF_ROLE[role]).strategy for role in active_roles(config) if role in BLOCK_OF_ROLE
        ),
        problems=tuple(problems),
    )


def _loss_line(actor: ActorConfig) -> str:
    """Describe the policy loss in one line, with values that differ from its defaults."""
    mode = actor.policy_loss.loss_mode
    defaults = loss_traits(mode)
    parts = [mode, _with_default(actor.loss_agg_mode, defaults.loss_agg_mode)]
    if defaults.clip is None:
        parts.append("no clip")
    else:
        clip = (actor.clip_ratio_low, actor.clip_ratio_high)
        parts.append(f"clip {_with_default(_distances(clip), _distances(defaults.clip))}")
    return ", ".join(parts)


def _with_default(value: str, default: str) -> str:
    """Return the value, and the default if it differs."""
    return value if value == default else f"{value} (default: {default})"


def _distances(clip: tuple[float, float]) -> str:
    """Format the distances of the clip bounds from a ratio of 1: `low/high`."""
    return f"{clip[0]:g}/{clip[1]:g}"


def _layout_problems(config: PPOConfig) -> list[Problem]:
    """Return problems of parallel sizes that do not divide their pool."""
    problems = []
    for role in active_roles(config):
        layout = layout_of(config, role)
        if layout.world_size % layout.ranks_per_copy == 0:
            continue
        key, value = _parallel_key(config, role)
        problems.append(
            Problem(
                key,
                value,
                f"a copy of the {role} takes {layout.ranks_per_copy} ranks ({layout.split}), which does not divide "
                f"the {layout.world_size} ranks of {layout.pool}",
                f"Choose sizes whose product is {near_values(divisors(layout.world_size), layout.ranks_per_copy)}, "
                "or change trainer.n_gpus_per_node or trainer.nnodes",
                ("trainer.n_gpus_per_node", "trainer.nnodes", "resource_pool_spec", "role_mapping"),
            )
        )
    return problems


def _parallel_key(config: PPOConfig, role: str) -> tuple[str, int]:
    """Return the key of a parallel size to name in a problem, and its value: of several sizes, the largest."""
    if role == "rollout":
        key = f"{ROLLOUT}.tensor_model_parallel_size"
    elif get_path(config, BLOCK_OF_ROLE[role]).strategy == "megatron":
        sizes = ("tensor", "pipeline")
        names = [f"{BLOCK_OF_ROLE[role]}.megatron_config.{size}_model_parallel_size" for size in sizes]
        names.append(f"{BLOCK_OF_ROLE[role]}.megatron_config.context_parallel_size")
        key = max(names, key=lambda name: get_path(config, name))
    else:
        key = f"{BLOCK_OF_ROLE[role]}.ulysses_sequence_parallel_size"
    return key, get_path(config, key)


def _update_plan(config: PPOConfig, role: str, problems: list[Problem]) -> UpdatePlan:
    """Return the plan of a trained role; its problems are added to `problems`."""
    block, layout = get_path(config, BLOCK_OF_ROLE[role]), layout_of(config, role)
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini_prompts = block.ppo_mini_batch_size
    mini_samples = mini_prompts * n
    per_rank = math.ceil(mini_samples / layout.dp_size)
    dynamic = block.use_dynamic_bsz
    micro = block.ppo_micro_batch_size_per_gpu
    plan = UpdatePlan(
        role=role,
        layout=layout,
        samples_per_rank=math.ceil(prompts * n / layout.dp_size),
        mini_batches=max(1, prompts // mini_prompts),
        mini_batch_prompts=mini_prompts,
        mini_batch_samples=mini_samples,
        mini_batch_samples_per_rank=per_rank,
        micro_batch_size=None if dynamic else micro,
        micro_batches=None if dynamic else math.ceil(per_rank / micro),
        # Per rank: the ranks of a sequence-parallel group share each sequence, and their budgets add up.
        token_budget=block.ppo_max_token_len_per_gpu if dynamic else None,
        epochs=block.ppo_epochs,
        optimizer_steps=block.ppo_epochs * max(1, prompts // mini_prompts),
    )
    # A critic that follows the actor has the same problem: report it once.
    actor_key = f"{ACTOR}.ppo_mini_batch_size"
    reported = any(problem.key == actor_key and problem.value == mini_prompts for problem in problems)
    problems += [] if reported else _mini_batch_problems(config, plan)
    problems += _micro_batch_problems(config, plan)
    return plan


# Keys of roles without updates: micro-batch size, switch of the token budget, token budget.
_LOG_PROB_KEYS = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
_INFER_KEYS = {
    "ref": _LOG_PROB_KEYS,
    "teacher": _LOG_PROB_KEYS,
    "reward_model": ("micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
}


def _infer_plan(config: PPOConfig, role: str) -> InferPlan:
    layout = layout_of(config, role)
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    size, dynamic, budget = (get_path(config, BLOCK_OF_ROLE[role])[name] for name in _INFER_KEYS[role])
    return InferPlan(
        role=role,
        layout=layout,
        samples_per_rank=math.ceil(samples / layout.dp_size),
        micro_batch_size=None if dynamic else size,
        token_budget=budget if dynamic else None,
        is_actor=role == "ref" and actor_is_reference(config),
    )


def _mini_batch_problems(config: PPOConfig, plan: UpdatePlan) -> list[Problem]:
    """Return the problem of a mini-batch size that does not divide a step's prompts, or that ranks cannot share."""
    key = f"{BLOCK_OF_ROLE[plan.role]}.ppo_mini_batch_size"
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini, dp_size = plan.mini_batch_prompts, plan.layout.dp_size
    batch, group_size = "data.train_batch_size", f"{ROLLOUT}.n"
    valid_sizes = [size for size in divisors(prompts) if size * n % dp_size == 0]
    if prompts % mini:
        why = f"does not divide {batch} = {prompts}"
        fix = f"Set it to {near_values(valid_sizes or divisors(prompts), mini)}"
        if prompts * n % mini == 0:
            why += (
                f". It counts prompts, not samples: {mini} only divides the {prompts * n} samples of a step "
                f"({count(prompts, 'prompt')} × {count(n, 'response')})"
            )
            if mini % n == 0 and mini // n in valid_sizes:
                why += f"; {count(mini, 'sample')} are {count(mini // n, 'prompt')}"
                fix = f"Set it to {mini // n}"
        return [Problem(key, mini, why, fix, (batch, group_size))]
    if mini * n % dp_size == 0:
        return []
    why = (
        f"{count(mini, 'prompt')} × {count(n, 'response')} = {count(mini * n, 'sample')}, which do not divide over the "
        f"{dp_size} data-parallel ranks of the {plan.role}"
    )
    if valid_sizes:
        fix = f"Set it to {near_values(valid_sizes, mini)}"
    else:
        step = dp_size // math.gcd(dp_size, n)
        fix = f"Set {batch} and {key} to multiples of {step}, or {group_size} to a multiple of {dp_size}"
    return [Problem(key, mini, why, fix, (batch, group_size, "trainer.n_gpus_per_node", "trainer.nnodes"))]


def _micro_batch_problems(config: PPOConfig, plan: UpdatePlan) -> list[Problem]:
    """Return the problem of a token budget below the longest sample, or of a micro-batch above the mini-batch."""
    block, per_rank = BLOCK_OF_ROLE[plan.role], plan.mini_batch_samples_per_rank
    mini, group_size = f"{block}.ppo_mini_batch_size", f"{ROLLOUT}.n"
    if plan.token_budget is not None:
        longest = config.data.max_prompt_length + config.data.max_response_length
        ranks_per_sequence = plan.layout.ranks_per_sequence
        if plan.token_budget * ranks_per_sequence >= longest:
            return []
        return [
            Problem(
                f"{block}.ppo_max_token_len_per_gpu",
                plan.token_budget,
                f"a sample of {longest} tokens (data.max_prompt_length + data.max_response_length) does not fit"
                + (f" on {ranks_per_sequence} sequence-parallel ranks" if ranks_per_sequence > 1 else ""),
                f"Set it to {math.ceil(longest / ranks_per_sequence)} or more",
                ("data.max_prompt_length", "data.max_response_length"),
            )
        ]
    if plan.micro_batch_size is None or plan.micro_batch_size <= per_rank:
        return []
    return [
        Problem(
            f"{block}.ppo_micro_batch_size_per_gpu",
            plan.micro_batch_size,
            f"is more than the {count(per_rank, 'sample')} of a mini-batch on each rank "
            f"({count(plan.mini_batch_samples, 'sample')} over {count(plan.layout.dp_size, 'rank')})",
            f"Set it to {per_rank} or less, or raise {mini}",
            (mini, group_size, "trainer.n_gpus_per_node", "trainer.nnodes", "data.train_batch_size"),
        )
    ]
