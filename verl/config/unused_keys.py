"""Notices about keys that were set but have no effect, and problems of unsupported or uninstalled engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from verl.config import names
from verl.config.block_rules import check_engine, is_installed
from verl.config.layout import (
    ACTOR,
    BLOCK_OF_ROLE,
    ROLLOUT,
    active_roles,
    actor_is_reference,
    continues_responses,
    engine_pauses_in_updates,
    needs_reference,
    serves_reward_model,
    shares_devices,
)
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, install_command, show
from verl.config.schema import Block, get_path, join, walk

# Maximum number of keys that a notice lists: scripts often set whole blocks.
_MAX_LISTED_KEYS = 5
_EXTERNAL_ENGINES = [name for name, row in names.ROLLOUTS.items() if row.third_party]
_LOAD_FORMATS = ("auto", "dummy")
_TEACHER = "distillation.teacher"
_REF, _MODEL, _CORRECTION = "actor_rollout_ref.ref", "actor_rollout_ref.model", "algorithm.rollout_correction"
_SEARCH_LENGTHS = ("data.max_start_length", "data.max_turn_length", "data.max_obs_length")
_SCALED_SUM = "seq-mean-token-sum-norm"
_REWARD_MODEL_KEYS = (
    *("model.*", "strategy", "micro_batch_size*", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "max_length"),
    *("ulysses_sequence_parallel_size", "use_torch_compile", "use_prefix_grouper", "fsdp_config.*"),
    *("megatron_config.*", "enable_resource_pool", "n_gpus_per_node", "nnodes"),
)
# Keys that an engine reads when it starts.
_STARTUP_KEYS = (
    *("gpu_memory_utilization", "quantization", "enforce_eager", "cudagraph_capture_sizes", "load_format"),
    *("expert_parallel_size", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens"),
    *("engine_kwargs", "in_process"),
)


class ReadRule(NamedTuple):
    """A condition under which keys are read.

    A key is unused if any rule that matches it is false; the notice has the reason of the first of these rules.
    """

    keys: tuple[str, ...]
    """Patterns of `fnmatch`."""
    is_read: Callable[[PPOConfig], bool]
    reason: str
    """Why the keys are not read, as the end of a sentence."""


def report_unused_keys(config: PPOConfig, report: Report) -> None:
    """Add a notice for each reason why keys that were set are not read, and list the keys."""
    false_rules = [rule for rule in RULES if not rule.is_read(config)]
    targets = _follows_targets(type(config))
    unused: dict[str, list[str]] = {}
    for path, value in config.changed.items():
        if path.endswith(".enable"):  # a switch that is off has an effect
            continue
        if path in targets and get_path(config, targets[path]) == value:  # as if the key were not set
            continue
        reason = next((rule.reason for rule in false_rules if any(fnmatchcase(path, key) for key in rule.keys)), None)
        if reason is not None:
            unused.setdefault(reason, []).append(f"{path} = {show(value)}")
    for reason, keys in unused.items():
        more = f" and {len(keys) - _MAX_LISTED_KEYS} more" if len(keys) > _MAX_LISTED_KEYS else ""
        report.notice(f"{', '.join(keys[:_MAX_LISTED_KEYS])}{more}: no effect, {reason}.")


def check_supported(config: PPOConfig, report: Report) -> None:
    """Report engines and values that are not supported or not installed."""
    rollout = config.actor_rollout_ref.rollout
    check_engine(ROLLOUT, rollout, report)
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        why, fix = f"is not supported by {ROLLOUT}.name = hf", f"Set it to 1, or {ROLLOUT}.name=native"
        report.invalid(f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size, why, fix)
    _check_installed(config, report)
    _report_keys_of_other_engines(config, report)


def _check_installed(config: PPOConfig, report: Report) -> None:
    """Report training engines whose package is not installed."""
    actor = config.actor_rollout_ref.actor.strategy
    for role, path in BLOCK_OF_ROLE.items():
        strategy = get_path(config, path).strategy
        engine, follows_actor = names.TRAINING_ENGINES[strategy], role != "actor" and strategy == actor
        if role in active_roles(config) and not follows_actor and not is_installed(engine.package):
            fix = f"Run {install_command(engine.install)}; or set {path}.strategy=fsdp2, which needs no install"
            report.invalid(f"{path}.strategy", strategy, f"{engine.package} is not installed", fix)


def _report_keys_of_other_engines(config: PPOConfig, report: Report) -> None:
    """Add notices about `engine_kwargs` and load formats that only other rollout engines use."""
    rollout = config.actor_rollout_ref.rollout
    others = [name for name in rollout.engine_kwargs if name != rollout.name or name == "hf"]
    for name in others:
        report.notice(f"{ROLLOUT}.engine_kwargs.{name} has no effect with {ROLLOUT}.name = {rollout.name}.")
    if rollout.load_format not in _LOAD_FORMATS and not names.rollout_traits(rollout.name).third_party:
        report.notice(
            f"{ROLLOUT}.load_format = {rollout.load_format} is treated as auto: {rollout.name} supports auto and dummy."
        )


def _follows_targets(cls: type[Block]) -> dict[str, str]:
    """Return the `follows` target of every key that has one."""
    targets: dict[str, str] = {}
    for path, entry in walk(cls):
        target = entry.key.follows
        if target is not None and entry.block is not None:
            targets |= {join(path, name): join(target, name) for name, _ in walk(entry.block)}
        elif target is not None:
            targets[path] = target
    return targets


def _below(block: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{block}.{key}" for key in keys)


def _is_set(path: str) -> Callable[[PPOConfig], bool]:
    """Return the condition that the value of the key is not null, False, 0 or -1."""
    return lambda config: get_path(config, path) not in (None, False, 0, -1)


def _is_off(path: str) -> Callable[[PPOConfig], bool]:
    return lambda config: not _is_set(path)(config)


def _is(path: str, value: str) -> Callable[[PPOConfig], bool]:
    return lambda config: get_path(config, path) == value


def _is_not(path: str, value: str) -> Callable[[PPOConfig], bool]:
    return lambda config: get_path(config, path) != value


def _uses_token_budget(config: PPOConfig) -> list[bool]:
    """Return for every active role whether it uses a token budget, the actor first."""
    policy = config.actor_rollout_ref
    dynamic = [policy.actor.use_dynamic_bsz, policy.rollout.log_prob_use_dynamic_bsz]
    dynamic += [policy.ref.log_prob_use_dynamic_bsz] if needs_reference(config) else []
    dynamic += [config.critic.use_dynamic_bsz] if config.critic.enable else []
    dynamic += [config.reward_model.use_dynamic_bsz] if config.reward_model.enable else []
    dynamic += [config.distillation.teacher.log_prob_use_dynamic_bsz] if config.distillation.local_teachers else []
    return dynamic


def _any_role_has_budget(config: PPOConfig) -> bool:
    return any(_uses_token_budget(config))


def _any_role_has_fixed_size(config: PPOConfig) -> bool:
    return not all(_uses_token_budget(config))


def _micro_batch_rules() -> Iterator[ReadRule]:
    """Micro-batches have a fixed size or a token budget. The actor's keys are read if any role uses them: the keys of
    other roles may follow them."""
    blocks = {
        ACTOR: ("use_dynamic_bsz", ("ppo",)),
        "critic": ("use_dynamic_bsz", ("ppo", "forward")),
        ROLLOUT: ("log_prob_use_dynamic_bsz", ("log_prob",)),
        _REF: ("log_prob_use_dynamic_bsz", ("log_prob",)),
        _TEACHER: ("log_prob_use_dynamic_bsz", ("log_prob",)),
    }
    for block, (switch, kinds) in blocks.items():
        has_budget, has_fixed_size = _is_set(f"{block}.{switch}"), _is_off(f"{block}.{switch}")
        if block == ACTOR:
            has_budget, has_fixed_size = _any_role_has_budget, _any_role_has_fixed_size
        tokens = _below(block, *(f"{kind}_max_token_len_per_gpu" for kind in kinds))
        yield ReadRule(tokens, has_budget, f"{block}.{switch} = False counts samples, not tokens")
        sizes = _below(block, *(f"{kind}_micro_batch_size*" for kind in kinds))
        yield ReadRule(sizes, has_fixed_size, f"{block}.{switch} = True fills micro-batches up to a budget of tokens")


def _engine_rules() -> Iterator[ReadRule]:
    """Keys of the training engine that is not selected."""
    for block in BLOCK_OF_ROLE.values():
        strategy, megatron = f"{block}.strategy", f"{block}.megatron_config"
        yield ReadRule((f"{megatron}.*",), _is(strategy, "megatron"), f"{strategy} is not megatron")
        fsdp_keys = _below(block, "fsdp_config.*")
        yield ReadRule(fsdp_keys, _is_not(strategy, "megatron"), f"{strategy} = megatron does not read it")
        switch = f"{megatron}.use_dist_checkpointing"
        yield ReadRule((f"{megatron}.dist_checkpointing_path",), _is_set(switch), f"{switch} = False")
    for block, model in ((ACTOR, _MODEL), ("critic", "critic.model"), ("reward_model", "reward_model.model")):
        packs = f"{block}.strategy = megatron always removes padding"
        yield ReadRule((f"{model}.use_remove_padding",), _is_not(f"{block}.strategy", "megatron"), packs)


def _model_rules() -> Iterator[ReadRule]:
    """Keys of LoRA and of the learning rate schedule."""
    for model, optim in ((_MODEL, f"{ACTOR}.optim"), ("critic.model", "critic.optim")):
        adapters = _below(model, "lora_alpha", "target_modules", "exclude_modules")
        yield ReadRule(adapters, _is_set(f"{model}.lora_rank"), f"LoRA is off; {model}.lora_rank=16 enables it")
        warmup = f"{optim}.lr_warmup_steps"
        yield ReadRule((f"{warmup}_ratio",), _is_off(warmup), f"{warmup} is set and takes precedence")
        yield ReadRule(
            (f"{optim}.min_lr_ratio",),
            _is(f"{optim}.lr_scheduler", "cosine"),
            f"the learning rate is constant; {optim}.lr_scheduler=cosine decays it",
        )


def _extension_rules(
    choice: str, rows: Mapping[str, names.EstimatorTraits] | Mapping[str, names.LossTraits], block: str
) -> Iterator[ReadRule]:
    """Keys of `block` that only some values of the key `choice` read, according to their `rows`.

    Extensions of users have no row and may read any key.
    """
    for key in dict.fromkeys(key for row in rows.values() for key in row.reads):
        readers = [name for name, row in rows.items() if key in row.reads]

        def is_read(config: PPOConfig, readers: list[str] = readers) -> bool:
            return get_path(config, choice) in readers or get_path(config, choice) not in rows

        reads = "reads" if len(readers) == 1 else "read"
        yield ReadRule((f"{block}.{key}",), is_read, f"only {choice}={' and '.join(readers)} {reads} it")


RULES: tuple[ReadRule, ...] = (
    ReadRule(
        ("max_turns", "retriever.*", *_SEARCH_LENGTHS, "algorithm.state_masking.*"),
        _is(f"{ROLLOUT}.mode", "async"),  # rows can select the search agent by agent_name, also without do_search
        "the search agent is off; do_search=True enables it",
    ),
    ReadRule(
        ("trainer.record.max_mb_per_step", "trainer.record.max_gb", "trainer.record.texts", "trainer.record.alert_url"),
        _is_set("trainer.record.enable"),
        "trainer.record.enable is False",
    ),
    ReadRule(
        ("trainer.max_staleness", "trainer.staleness_strategy", "trainer.partial_rollout"),
        _is("trainer.mode", "async"),
        "only trainer.mode=async reads it",
    ),
    ReadRule(
        ("trainer.partial_kv",),
        continues_responses,
        "no response continues across weight syncs; trainer.mode=async with partial_rollout=True and max_staleness > 0"
        " enables that",
    ),
    ReadRule(
        ("trainer.overlap",),
        lambda config: config.trainer.mode != "sync" and shares_devices(config),
        "generation does not overlap training on shared devices; trainer.mode=async without a rollout pool enables it",
    ),
    ReadRule(
        ("critic.*", "trainer.max_critic_ckpt_to_keep"),
        _is_set("critic.enable"),
        "there is no critic; algorithm.adv_estimator=gae needs one, critic.enable=True trains one",
    ),
    ReadRule(
        (f"{_REF}.*",),
        needs_reference,
        f"there is no reference policy; {ACTOR}.use_kl_loss=True or algorithm.use_kl_in_reward=True starts one",
    ),
    ReadRule(
        ("distillation.distillation_loss.topk",),
        lambda config: not config.distillation.enabled or config.distillation.distillation_loss.over_top_tokens,
        f"only distillation.distillation_loss.loss_mode={' and '.join(names.TOP_K_KLS)} read it",
    ),
    ReadRule(
        ("distillation.*",),
        _is_set("distillation.enabled"),
        "there are no teachers; distillation.enabled=True starts them",
    ),
    ReadRule(
        _below(
            _REF,
            *("fsdp_config.*", "megatron_config.*", "ulysses_sequence_parallel_size", "use_torch_compile"),
            "use_prefix_grouper",
        ),
        lambda config: not actor_is_reference(config),
        f"with {_MODEL}.lora_rank above 0 the actor without adapters is the reference",
    ),
    ReadRule(
        _below("reward_model", *_REWARD_MODEL_KEYS),
        _is_set("reward_model.enable"),
        "there is no reward model; reward_model.enable=True starts one",
    ),
    ReadRule(
        ("reward_model.rollout.*",),
        serves_reward_model,
        "no reward model is served; set reward_model.judge.enable=True or custom_reward_function.path",
    ),
    ReadRule(("reward_model.judge.*",), _is_set("reward_model.judge.enable"), "reward_model.judge.enable = False"),
    ReadRule(
        ("reward_model.path",),
        lambda config: config.reward_model.enable or config.reward_model.url is not None,
        "there is no reward model; reward_model.enable=True starts one",
    ),
    ReadRule(
        _below("reward_model", "n_gpus_per_node", "nnodes"),
        lambda config: config.reward_model.enable_resource_pool or "reward_pool" in config.resource_pool_spec,
        "the reward model has no separate pool; reward_model.enable_resource_pool=True adds one",
    ),
    ReadRule(
        ("reward_model.overlong_buffer.*",),
        _is_set("reward_model.overlong_buffer.enable"),
        "reward_model.overlong_buffer.enable = False",
    ),
    ReadRule(
        _below(ACTOR, "kl_loss_coef", "kl_loss_type"), _is_set(f"{ACTOR}.use_kl_loss"), f"{ACTOR}.use_kl_loss = False"
    ),
    ReadRule(
        _below("algorithm", "kl_penalty", "kl_ctrl.*"),
        _is_set("algorithm.use_kl_in_reward"),
        "algorithm.use_kl_in_reward = False",
    ),
    ReadRule(
        _below("algorithm.kl_ctrl", "target_kl", "horizon"),
        _is("algorithm.kl_ctrl.type", "adaptive"),
        "algorithm.kl_ctrl.type = fixed; adaptive reads it",
    ),
    ReadRule(
        _below("sandbox_fusion", "max_concurrent", "memory_limit_mb"),
        _is_set("sandbox_fusion.url"),
        "sandbox_fusion.url is not set; the local sandbox reads sandbox.memory_limit_mb",
    ),
    ReadRule(
        ("algorithm.filter_groups.*",),
        _is_set("algorithm.filter_groups.enable"),
        "algorithm.filter_groups.enable = False",
    ),
    ReadRule(
        (f"{_CORRECTION}.loss_type",), _is_set(f"{_CORRECTION}.bypass_mode"), f"{_CORRECTION}.bypass_mode = False"
    ),
    ReadRule(
        (f"{_CORRECTION}.rollout_is_batch_normalize",),
        _is_set(f"{_CORRECTION}.rollout_is"),
        f"{_CORRECTION}.rollout_is is not set",
    ),
    ReadRule(
        _below(_CORRECTION, "rollout_rs_threshold", "rollout_rs_threshold_lower"),
        _is_set(f"{_CORRECTION}.rollout_rs"),
        f"{_CORRECTION}.rollout_rs is not set",
    ),
    ReadRule(
        (f"{_CORRECTION}.rollout_is_threshold",),
        lambda config: bool(get_path(config, _CORRECTION).rollout_is or get_path(config, _CORRECTION).rollout_rs),
        f"{_CORRECTION}.rollout_is and rollout_rs are not set",
    ),
    ReadRule(
        _below(f"{ROLLOUT}.val_kwargs", "temperature", "top_p", "top_k"),
        _is_set(f"{ROLLOUT}.val_kwargs.do_sample"),
        f"validation is greedy; {ROLLOUT}.val_kwargs.do_sample=True (and a temperature) samples",
    ),
    ReadRule(
        _below(ROLLOUT, *_STARTUP_KEYS),
        lambda config: not config.actor_rollout_ref.rollout.server_urls,
        f"the engines at {ROLLOUT}.server_urls are already running",
    ),
    ReadRule(
        _below(ROLLOUT, "n_gpus_per_node"),
        lambda config: config.actor_rollout_ref.rollout.nnodes > 0,
        f"rollout has no separate devices; {ROLLOUT}.nnodes=1 adds them",
    ),
    ReadRule(
        _below(ROLLOUT, "in_process", "cudagraph_capture_sizes"),
        lambda config: names.rollout_traits(config.actor_rollout_ref.rollout.name).third_party,
        f"only {ROLLOUT}.name={', '.join(_EXTERNAL_ENGINES)} read it",
    ),
    ReadRule(
        _below(ROLLOUT, "prometheus.port"),
        _is_set(f"{ROLLOUT}.prometheus.enable"),
        f"{ROLLOUT}.prometheus.enable = False",
    ),
    ReadRule(
        _below(ROLLOUT, "return_routed_experts"),
        lambda config: config.actor_rollout_ref.rollout.name in ("native", "vllm"),
        f"only {ROLLOUT}.name=native and vllm return them",
    ),
    ReadRule(
        _below(ROLLOUT, "free_cache_engine"),
        lambda config: config.trainer.mode == "sync" or not shares_devices(config),
        "with trainer.mode other than sync responses keep their KV cache during training",
    ),
    ReadRule(
        _below(ROLLOUT, "free_weights"),
        lambda config: config.trainer.mode == "sync" or not shares_devices(config) or engine_pauses_in_updates(config),
        "generation continues during training and needs the weights; trainer.overlap=False pauses it",
    ),
    ReadRule(
        _below(ROLLOUT, "free_weights"),
        lambda config: shares_devices(config) and not config.actor_rollout_ref.rollout.server_urls,
        "the engine does not share its devices with training",
    ),
    ReadRule(
        _below(ROLLOUT, "top_p", "top_k", "min_p"), _is_set(f"{ROLLOUT}.do_sample"), f"{ROLLOUT}.do_sample = False"
    ),
    ReadRule(
        _below(ROLLOUT, "agent.*", "multi_turn.*"),
        _is(f"{ROLLOUT}.mode", "async"),
        f"agent loops are off; {ROLLOUT}.mode=async enables them",
    ),
    ReadRule(
        _below(ACTOR, "loss_scale_factor"),
        lambda config: _SCALED_SUM in (config.actor_rollout_ref.actor.loss_agg_mode, config.critic.loss_agg_mode),
        f"only loss_agg_mode={_SCALED_SUM} of actor or critic reads it",
    ),
    ReadRule(
        ("critic.loss_scale_factor",),
        _is("critic.loss_agg_mode", _SCALED_SUM),
        f"only critic.loss_agg_mode={_SCALED_SUM} reads it",
    ),
    *_engine_rules(),
    *_extension_rules("algorithm.adv_estimator", names.ADV_ESTIMATORS, "algorithm"),
    *_extension_rules(f"{ACTOR}.policy_loss.loss_mode", names.POLICY_LOSSES, ACTOR),
    *_model_rules(),
    *_micro_batch_rules(),
)
