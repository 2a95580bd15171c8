"""Replaces nulls by the values they stand for. All other code sees the resolved configuration."""

from __future__ import annotations

import math
from typing import Any

from verl.config import names
from verl.config.algorithm_rules import resolve_correction
from verl.config.block_rules import sharing_exclusion
from verl.config.devices import visible_gpu_count
from verl.config.layout import (
    ACTOR,
    BLOCK_OF_ROLE,
    MODEL_OF_ROLE,
    ROLLOUT,
    active_roles,
    async_settings,
    check_loop_capacity,
    engine_pauses_in_updates,
    layout_of,
    resolve_asynchronous,
    resolve_partial_kv,
    shares_devices,
)
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.roles import ActorConfig
from verl.config.rollout import applies_lora
from verl.config.schema import Block, get_path, set_path, walk
from verl.config.trainer import RunConfig

GLOBAL_POOL, REWARD_POOL, ROLLOUT_POOL = "global_pool", "reward_pool", "rollout_pool"
DEFAULT_GROUP_SIZE = 4
DEFAULT_MICRO_BATCH = 4
# Conversations of all loop workers per sequence that the engines can decode: with two, engines stay full while
# conversations spend up to half of their time in tools. A waiting conversation is a coroutine and costs little.
CONVERSATIONS_PER_SLOT = 2
MIN_CONCURRENT_REQUESTS = 128  # per loop worker: slow tools need many conversations even with a small engine
# Default of `max_num_seqs`; lower if training never has so many responses in flight.
MAX_SEQUENCES = 1024
# Validation responses to log.
TRACKED_RESPONSES, CONSOLE_RESPONSES = 20, 5


def resolve(config: PPOConfig, report: Report) -> None:
    """Replace every null that stands for another value, in the order of their dependencies."""
    resolve_run(config.trainer)
    resolve_search(config, report)
    resolve_asynchronous(config, report)
    resolve_correction(config, report)
    _logged_responses(config)
    _precisions(config)
    _sampling(config, report)
    _clip_bounds(config, report)
    _policy_loss(config.actor_rollout_ref.actor)
    empty_lists(config)
    _resolve_follows(
        config, only=("trainer.n_gpus_per_node", "strategy", "ulysses_sequence_parallel_size", "megatron_config")
    )
    _expert_sizes(config)
    _pools(config, report)
    resolve_partial_kv(config)
    _critic(config)
    _micro_batches(config, report)
    _resolve_follows(config)
    _shared_prefixes(config, report)
    _generation_batches(config, report)
    _lengths(config)
    _agents(config)
    _concurrent_sequences(config)
    check_loop_capacity(config, report)
    # Reward models with another chat template and agents need the messages of a prompt.
    has_reward_model = config.reward_model.enable or config.reward_model.url is not None
    needs_messages = has_reward_model or config.actor_rollout_ref.rollout.mode == "async"
    config.data.return_raw_chat = config.data.return_raw_chat or needs_messages


def resolve_run(trainer: RunConfig) -> None:
    """Resolve the devices and the checkpoint folder."""
    gpus = visible_gpu_count()
    if trainer.device == "auto":
        trainer.device = "cuda" if gpus else "cpu"
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = max(1, gpus) if trainer.device == "cuda" else 1
    if trainer.default_local_dir is None:
        trainer.default_local_dir = f"./checkpoints/{trainer.project_name}/{trainer.experiment_name}"


def _logged_responses(config: PPOConfig) -> None:
    trainer = config.trainer
    if trainer.console_val_generations is None:
        tracked = trainer.log_val_generations
        trainer.console_val_generations = CONSOLE_RESPONSES if tracked is None else tracked
    if trainer.log_val_generations is None:
        trainer.log_val_generations = TRACKED_RESPONSES


def _precisions(config: PPOConfig) -> None:
    on_gpu = config.trainer.device == "cuda"
    for block in (config.actor_rollout_ref.actor, config.critic, config.reward_model):
        default = "bf16" if on_gpu else "fp32"
        block.fsdp_config.mixed_precision = block.fsdp_config.mixed_precision or default
        block.megatron_config.dtype = block.megatron_config.dtype or default
    rollout = config.actor_rollout_ref.rollout
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if on_gpu else "float32"


def _sampling(config: PPOConfig, report: Report) -> None:
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    if rollout.n is None:
        compares = names.estimator_traits(estimator).uses_groups and config.distillation.has_advantages
        rollout.n = DEFAULT_GROUP_SIZE if compares else 1
        if compares:
            report.notice(
                f"{ROLLOUT}.n is not set: {rollout.n} responses per prompt, because {estimator} compares them."
            )
    if rollout.val_kwargs.do_sample is None:
        rollout.val_kwargs.do_sample = rollout.val_kwargs.temperature > 0


def _agents(config: PPOConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.agent.default_agent_loop is None:
        with_tools = "tool_agent" if rollout.multi_turn.enable else names.SINGLE_TURN
        rollout.agent.default_agent_loop = "search_agent" if config.do_search else with_tools
    if rollout.agent.max_concurrent_requests is None:
        slots = layout_of(config, "rollout").dp_size * (rollout.max_num_seqs or MAX_SEQUENCES)
        per_worker = math.ceil(CONVERSATIONS_PER_SLOT * slots / rollout.agent.num_workers)
        rollout.agent.max_concurrent_requests = max(MIN_CONCURRENT_REQUESTS, per_worker)


def _concurrent_sequences(config: PPOConfig) -> None:
    """Size the engine for the responses of training, if nothing else generates: KV memory for more is never used."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_num_seqs is not None:
        return
    rollout.max_num_seqs = MAX_SEQUENCES
    # The size of validation sets is unknown here; agents may send several requests at a time.
    if config.data.val_files or rollout.agent.default_agent_loop != names.SINGLE_TURN:
        return
    replicas = layout_of(config, "rollout").dp_size
    batches = 1 if config.trainer.mode == "sync" else 1 + async_settings(config.trainer).max_staleness
    responses = math.ceil(batches * config.data.gen_batch_size / replicas) * rollout.n
    # Whole groups are routed to replicas by their load, which is not exactly even.
    rollout.max_num_seqs = max(1, min(MAX_SEQUENCES, responses * (1 if replicas == 1 else 2)))


def _clip_bounds(config: PPOConfig, report: Report) -> None:
    """Convert clip ratios given as bounds of the ratio (0.8, 1.2), one or both, to distances from 1 (0.2, 0.2)."""
    actor = config.actor_rollout_ref.actor
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    if actor.policy_loss.loss_mode != "vanilla":
        return
    low_is_bound = low is not None and 0.5 < low < 1
    high_is_bound = high is not None and 1 < high <= 2
    # If the other value is a distance of 0.5 or more, 0.8 is a distance as well.
    if low_is_bound and (high is None or high < 0.5 or high_is_bound):
        actor.clip_ratio_low = _bound_to_distance(report, "clip_ratio_low", low, round(1 - low, 12))
    if high_is_bound and (low is None or low < 0.5 or low_is_bound):
        actor.clip_ratio_high = _bound_to_distance(report, "clip_ratio_high", high, round(high - 1, 12))


def _bound_to_distance(report: Report, name: str, bound: float, distance: float) -> float:
    report.notice(
        f"{ACTOR}.{name} = {bound:g} is a bound of the ratio; it is converted to a distance of {distance:g} from 1."
    )
    return distance


def _policy_loss(actor: ActorConfig) -> None:
    """Set unset keys to the defaults of the policy loss; `clip_ratio` alone sets both distances."""
    defaults = names.loss_traits(actor.policy_loss.loss_mode)
    if actor.loss_agg_mode is None:
        actor.loss_agg_mode = defaults.loss_agg_mode
    if actor.clip_ratio is None:
        low, high = defaults.clip_range
        actor.clip_ratio = low
        actor.clip_ratio_low = low if actor.clip_ratio_low is None else actor.clip_ratio_low
        actor.clip_ratio_high = high if actor.clip_ratio_high is None else actor.clip_ratio_high


def _generation_batches(config: PPOConfig, report: Report) -> None:
    """Without dynamic sampling, set `gen_batch_size` to `train_batch_size`: every generated prompt is trained on."""
    data = config.data
    if not config.algorithm.filter_groups.enable and data.gen_batch_size != data.train_batch_size:
        report.notice(
            f"data.gen_batch_size = {data.gen_batch_size} has no effect without algorithm.filter_groups.enable=True."
        )
        data.gen_batch_size = data.train_batch_size


def empty_lists(config: Block) -> None:
    """Replace nulls of lists by empty lists."""
    for path, entry in walk(type(config)):
        if entry.key.null == "none" and not entry.optional and get_path(config, path) is None:
            set_path(config, path, [])


def _pools(config: PPOConfig, report: Report) -> None:
    """Resolve the resource pools, the pool of each role, and which memory the rollout engine frees."""
    trainer, reward, rollout = config.trainer, config.reward_model, config.actor_rollout_ref.rollout
    if config.resource_pool_spec is None:
        config.resource_pool_spec = {GLOBAL_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}
        if reward.enable and reward.enable_resource_pool:
            config.resource_pool_spec[REWARD_POOL] = [reward.n_gpus_per_node] * reward.nnodes
        if rollout.nnodes:
            config.resource_pool_spec[ROLLOUT_POOL] = [rollout.n_gpus_per_node] * rollout.nnodes
    pools = config.resource_pool_spec
    default = GLOBAL_POOL if GLOBAL_POOL in pools or not pools else next(iter(pools))
    mapping: dict[str, str] = {}
    for name, pool in (config.role_mapping or {}).items():
        if name not in names.ROLES and name not in names.ROLE_GROUPS:
            known = ", ".join((*names.ROLES, *names.ROLE_GROUPS))
            report.problem(f"role_mapping.{name}", pool, "unknown role", f"Known roles: {known}")
        elif pool not in pools:
            report.problem(
                f"role_mapping.{name}", pool, "unknown pool", f"Known pools (resource_pool_spec): {', '.join(pools)}"
            )
        else:
            mapping |= dict.fromkeys(names.ROLE_GROUPS.get(name, (name,)), pool)
    # A single role takes precedence over a group of roles that contains it.
    mapping |= {role: pool for role, pool in (config.role_mapping or {}).items() if role in mapping and pool in pools}
    if reward.enable and REWARD_POOL in pools:
        mapping.setdefault("reward_model", REWARD_POOL)
    if rollout.nnodes and ROLLOUT_POOL in pools:
        mapping.setdefault("rollout", ROLLOUT_POOL)
    for role in ("ref", "teacher"):
        mapping.setdefault(role, mapping.get("actor", default))
    config.role_mapping = {role: mapping.get(role, default) for role in names.ROLES}
    if rollout.return_routed_experts is None:
        rollout.return_routed_experts = config.actor_rollout_ref.actor.router_replay.mode == "R3"
    if rollout.free_weights is None and applies_lora(config.actor_rollout_ref.model, rollout):
        rollout.free_weights = False  # the frozen weights would have to be sent again
    if config.trainer.mode != "sync" and shares_devices(config):
        if rollout.free_weights is None:
            rollout.free_weights = rollout.free_cache_engine
        rollout.free_weights = rollout.free_weights and engine_pauses_in_updates(config)
        rollout.free_cache_engine = False  # responses are unfinished during training
    if rollout.free_weights is None:
        rollout.free_weights = rollout.free_cache_engine and shares_devices(config) and not rollout.server_urls


def _expert_sizes(config: PPOConfig) -> None:
    for block in BLOCK_OF_ROLE.values():
        sizes = get_path(config, block).megatron_config
        if sizes.expert_tensor_parallel_size is None:
            sizes.expert_tensor_parallel_size = sizes.tensor_model_parallel_size


def _critic(config: PPOConfig) -> None:
    critic = config.critic
    if critic.enable is None:
        reads_values = bool(names.estimator_traits(config.algorithm.adv_estimator).needs_critic)
        critic.enable = reads_values and config.distillation.has_advantages
    if critic.ppo_mini_batch_size is None:
        critic.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.trainer.max_critic_ckpt_to_keep is None:
        config.trainer.max_critic_ckpt_to_keep = config.trainer.max_actor_ckpt_to_keep


def _micro_batches(config: PPOConfig, report: Report) -> None:
    """Convert sizes summed over ranks to sizes per rank; the default of updates is 4, at most a rank's samples."""
    for role, block in (("actor", ACTOR), ("critic", "critic")):
        _convert_total(config, report, block, "ppo_micro_batch_size", role)
        update = get_path(config, block)
        if update.ppo_micro_batch_size_per_gpu is None:
            samples = update.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
            share = math.ceil(samples / layout_of(config, role).dp_size)
            update.ppo_micro_batch_size_per_gpu = min(DEFAULT_MICRO_BATCH, share)
    _convert_total(config, report, "critic", "forward_micro_batch_size", "critic")
    _convert_total(config, report, ROLLOUT, "log_prob_micro_batch_size", "actor")
    _convert_total(config, report, "actor_rollout_ref.ref", "log_prob_micro_batch_size", "ref")
    _convert_total(config, report, "reward_model", "micro_batch_size", "reward_model")
    _convert_total(config, report, "distillation.teacher", "log_prob_micro_batch_size", "teacher")


def _convert_total(config: PPOConfig, report: Report, block: str, name: str, role: str) -> None:
    values, total_key, per_key = get_path(config, block), f"{block}.{name}", f"{block}.{name}_per_gpu"
    total, per_gpu = values[name], values[f"{name}_per_gpu"]
    if total is None:
        return
    setattr(values, name, None)
    dp_size = layout_of(config, role).dp_size
    if per_gpu is not None:
        why = f"is the sum of {per_key} over all ranks, but {per_key} = {per_gpu} is set too"
        report.problem(total_key, total, why, f"Keep {per_key} only")
        return
    if total % dp_size:
        report.problem(
            total_key,
            total,
            f"is not divisible by the {dp_size} data-parallel ranks of the {role}",
            f"Set it to a multiple of {dp_size}, or set {per_key} instead",
            ("trainer.n_gpus_per_node", "trainer.nnodes", "resource_pool_spec"),
        )
        return
    setattr(values, f"{name}_per_gpu", total // dp_size)


def _resolve_follows(config: PPOConfig, only: tuple[str, ...] = ()) -> None:
    """Set null keys to the value of the key they follow; `only`: just for targets with one of these suffixes."""
    for path, entry in walk(PPOConfig):
        target = entry.key.follows
        if target is None or (only and not target.endswith(only)):
            continue
        if entry.block is None:
            if get_path(config, path) is None:
                set_path(config, path, _followed_value(config, target))
            continue
        block, followed = get_path(config, path), get_path(config, target)
        for name, below in walk(entry.block):
            if below.block is None and get_path(block, name) is None:
                set_path(block, name, get_path(followed, name))


def _followed_value(config: PPOConfig, path: str) -> Any:
    """Return the value at `path`, following a chain of nulls."""
    value = get_path(config, path)
    if value is not None:
        return value
    target = dict(walk(PPOConfig))[path].key.follows
    return None if target is None else _followed_value(config, target)


def _shared_prefixes(config: PPOConfig, report: Report) -> None:
    """`auto` means off where prefixes cannot be shared: in Megatron, in rows with padding, in float32 on a GPU."""
    roles_by_reason: dict[str, list[str]] = {}
    for role, path in BLOCK_OF_ROLE.items():
        block, packs = get_path(config, path), get_path(config, MODEL_OF_ROLE[role]).use_remove_padding
        reason = sharing_exclusion(block, config, packs)
        if block.use_prefix_grouper == "auto" and reason is not None:
            block.use_prefix_grouper = "false"
            if role in active_roles(config):
                roles_by_reason.setdefault(reason, []).append(role)
    for reason, roles in roles_by_reason.items():
        report.notice(f"use_prefix_grouper = auto ({', '.join(roles)}): prefixes are not shared, because {reason}.")


def _lengths(config: PPOConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_model_len is None:
        longest = max(rollout.max_new_tokens, rollout.val_kwargs.max_new_tokens)
        rollout.max_model_len = config.data.max_prompt_length + longest


def resolve_search(config: PPOConfig, report: Report) -> None:
    """Set `rollout.mode=async` for the search agent; with a local corpus no service is used."""
    retriever, rollout = config.retriever, config.actor_rollout_ref.rollout
    if retriever.corpus_path and "retriever.url" not in config.changed:
        retriever.url = None
    if not config.do_search:
        return
    if rollout.mode == "sync":
        rollout.mode = "async"
        report.notice(f"do_search = True: {ROLLOUT}.mode is set to async.")
    _convert_search_lengths(config, report)


def _convert_search_lengths(config: PPOConfig, report: Report) -> None:
    """Convert lengths as in Search-R1 (turn, context) to lengths of the prompt and of all turns."""
    data = config.data
    start, context, turn = data.max_start_length, data.max_prompt_length, data.max_response_length
    if start is None or start >= context:
        return
    data.max_prompt_length, data.max_response_length = start, context - start + turn
    if data.max_turn_length is None:
        data.max_turn_length = turn
    report.notice(
        f"data.max_start_length = {start}: lengths as in Search-R1: prompts up to {start} tokens, "
        f"turns up to {data.max_turn_length}, all turns with search results up to {data.max_response_length}."
    )
