"""Keys of other versions: ignored with a notice, accepted with a fixed value, or converted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from verl.config.problems import Report


class FixedValue(NamedTuple):
    """A key of other versions that is accepted with one value only."""

    value: Any
    why: str
    """Why other values are not supported."""
    fix: str


_ROLLOUT = "actor_rollout_ref.rollout"
FIXED = {
    f"{_ROLLOUT}.over_sample_rate": FixedValue(0, "dropping the slowest responses favours short ones", "Leave it out"),
    f"{_ROLLOUT}.pipeline_model_parallel_size": FixedValue(
        1, "replicas support tensor parallelism only", f"Set {_ROLLOUT}.tensor_model_parallel_size"
    ),
    "reward_model.rollout.tensor_model_parallel_size": FixedValue(
        1, "each device serves one copy of the reward model", "Leave it out, or serve it elsewhere: reward_model.url"
    ),
    "reward.reward_manager.source": FixedValue(
        "register",
        "reward managers are selected by their registered name",
        "Add the module that registers it to external_libs, and set reward.reward_manager.name",
    ),
}
# Pattern of the full key -> why it is not needed. Keys that would change results are not listed: they are errors.
OBSOLETE = {
    "actor_rollout_ref.hybrid_engine": "training and generation share devices unless role_mapping separates them",
    "actor_rollout_ref.nccl_timeout": "worker groups have their own timeouts",
    "actor_rollout_ref.model.use_fused_kernels": "the fused output head is used if the model supports it",
    "actor_rollout_ref.model.fused_kernel_options": "the fused output head is used if the model supports it",
    "*model.use_liger": "fused output head and packed attention are built in",
    "*.model.external_lib": "use external_libs",
    "critic.model.tokenizer_path": "the critic uses the actor's tokenizer",
    "*.model.use_shm": "weights are read once per node and shared",
    "*.model.fsdp_config": "use fsdp_config of the role",
    "*.enable_activation_offload": "use gradient checkpointing",
    "actor_rollout_ref.actor.shuffle": "mini-batches are determined by data.seed",
    "actor_rollout_ref.actor.state_masking": "environment tokens are always masked",
    "critic.shuffle": "mini-batches are determined by data.seed",
    "*.data_loader_seed": "data.seed is the seed of the run",
    "*.megatron*.seed": "data.seed is the seed of the run",
    "*.entropy_from_logits_with_chunking": "log-probs and entropy are always computed in chunks",
    "*.entropy_checkpointing": "log-probs and entropy are always computed in chunks",
    "actor_rollout_ref.actor.calculate_entropy": "entropy is always computed and logged",
    "actor_rollout_ref.ref.model": "the reference is the actor's initial model",
    "*.rollout_n": "actor_rollout_ref.rollout.n is used",
    "*.load_weight": "weights are always loaded",
    "*fsdp_config.wrap_policy": "layers are sharded one by one",
    "*fsdp_config.offload_policy": "use param_offload and optimizer_offload",
    "*fsdp_config.cpu_offload": "use grad_offload or optim.state_dtype=bf16",
    "*fsdp_config.offload_params": "use grad_offload or optim.state_dtype=bf16",
    "*.fsdp_config.use_orig_params": "fully_shard always uses the original parameters",
    "*fsdp_config.model_dtype": "master weights are fp32; mixed_precision sets the compute precision",
    "*.fsdp_config.use_torch_compile": "use actor_rollout_ref.actor.use_torch_compile",
    "*.fsdp_config.forward_only": "it follows from the role",
    "*.fsdp_config.strategy": "use strategy of the role",
    "actor_rollout_ref.ref.fsdp_config.gradient_checkpointing": "the reference has no backward pass",
    "actor_rollout_ref.ref.megatron_config.router_replay": "only the actor replays experts",
    "critic.megatron_config.router_replay": "only the actor replays experts",
    "reward_model.megatron_config.router_replay": "only the actor replays experts",
    "*.checkpoint.async_save": "checkpoints are written in the background",
    "actor_rollout_ref.rollout.prompt_length": "use data.max_prompt_length",
    "actor_rollout_ref.rollout.disable_log_stats": "engine statistics are part of the metrics",
    "actor_rollout_ref.rollout.calculate_log_probs": "rollout log-probs are always kept",
    "actor_rollout_ref.rollout.layered_summon_param": "weights are synced in buckets",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "weights and KV cache always wake up separately",
    "actor_rollout_ref.rollout.swap_space": "preempted sequences are recomputed",
    "actor_rollout_ref.rollout.data_parallel_size": "replicas are devices / tensor_model_parallel_size",
    "actor_rollout_ref.rollout.enable_sleep_mode": "use free_cache_engine and free_weights",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "the transport follows from the placement of the engine",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "token ids go in and out",
    "data.return_raw_input_ids": "raw prompts are kept if a role needs them",
    "data.return_full_prompt": "raw prompts are kept if a role needs them",
    "data.filter_overlong_prompts_workers": "tokenising runs in parallel and is cached",
    "data.validation_shuffle": "validation keeps the order of the file",
    "data.trust_remote_code": "use actor_rollout_ref.model.trust_remote_code",
    "data.tokenizer": "the tokenizer is loaded from actor_rollout_ref.model.path",
    "data.pad_mode": "use model.use_remove_padding",
    "data.balance_dp_token": "tokens are always balanced over ranks",
    "data.use_shm": "files are read once and cached",
    "reward_model.rollout.prompt_length": "use max_model_len",
    "reward_model.rollout.response_length": "the length is part of each request",
    "reward_model.rollout.free_cache_engine": "on shared devices it is offloaded while idle",
    "reward_model.rollout.skip_tokenizer_init": "it reads messages",
    "reward_model.launch_reward_fn_async": "scoring always overlaps generation",
    "trainer.del_local_ckpt_after_load": "use max_actor_ckpt_to_keep",
    "trainer.remove_previous_ckpt_in_save": "use max_actor_ckpt_to_keep",
    "trainer.esi_redundant_time": "use trainer.save_within",
    "trainer.ray_wait_register_center_timeout": "workers find each other through Ray",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "async_training.require_batches": "a step takes data.train_batch_size prompts",
    "async_training.trigger_parameter_sync_step": "weights are synced after every step",
    "async_training.use_trainer_do_validate": "validation runs concurrently with training",
    "trainer.v1.separate_async.parameter_sync_step": "weights are synced after every step",
    "trainer.profile_*": "per-phase timing is always on",
    "*_nsight_options": "per-phase timing is always on",
    "*profiler": "per-phase timing is always on",
    "ray_init.timeline_json_file": "per-phase timing is always on",
    "ray_kwargs": "use ray_init.num_cpus",
    "*._target_": "blocks have fixed types",
}


def why_obsolete(path: str) -> str | None:
    """Return why the key at `path` is obsolete; None if it is not."""
    return next((reason for pattern, reason in OBSOLETE.items() if fnmatchcase(path, pattern)), None)


def convert_async_training(values: dict[str, Any], report: Report) -> None:
    """Convert `async_training.*` and `rollout.total_rollout_steps` in `values`, which use other units."""
    old, rollout = dict(values.get("async_training") or {}), dict(values.get("rollout") or {})
    threshold, steps = old.pop("staleness_threshold", None), rollout.pop("total_rollout_steps", None)
    try:
        per_update = [_number(old.get(name)) for name in ("require_batches", "trigger_parameter_sync_step")]
        if threshold is not None:
            _set_converted(
                values,
                report,
                "async_training.staleness_threshold",
                "trainer",
                max_staleness=math.ceil(float(threshold)),
            )
        if "async_training" in values and _number(values["data"].get("train_batch_size")) == 0:
            mini = _number(values["actor_rollout_ref"]["actor"].get("ppo_mini_batch_size"))
            prompts = math.prod(factor or 1 for factor in (*per_update, mini))
            _set_converted(
                values, report, "data.train_batch_size=0", "data", train_batch_size=prompts, gen_batch_size=None
            )
        if steps is not None:
            batch = max(1, _number(values["data"].get("train_batch_size")))
            total = _number(steps) // batch
            if total < 1:
                why = f"a step needs more prompts (data.train_batch_size = {batch})"
                report.problem("rollout.total_rollout_steps", steps, why, f"Set it to {batch} or more")
                total = 1
            _set_converted(values, report, "rollout.total_rollout_steps", "trainer", total_training_steps=total)
    except (TypeError, ValueError) as error:
        report.problem("async_training", old, f"is invalid ({error})", "Set trainer.mode and trainer.max_staleness")
    for name, block in (("async_training", old), ("rollout", rollout)):
        if name in values:
            values[name] = block
            if not block:
                del values[name]


def _number(value: Any) -> int:
    return int(value) if value is not None else 0


def _set_converted(values: dict[str, Any], report: Report, old_key: str, block: str, **keys: Any) -> None:
    """Set `keys` in a block of `values`, and report that `old_key` is converted to the first of them."""
    existing: Mapping[str, Any] = values.get(block) or {}
    values[block] = {**existing, **keys}
    name, value = next(iter(keys.items()))
    report.record_alias(f"{block}.{name}", old_key)
    report.notice(f"{old_key} is converted to {block}.{name} = {value}.")


def convert_reward_workers(values: dict[str, Any], report: Report) -> None:
    """Convert `reward.num_workers` in `values` to an argument of the reward manager."""
    reward = dict(values.get("reward") or {})
    workers = reward.pop("num_workers", None)
    if workers is not None:
        block = dict(values.get("reward_model") or {})
        values["reward_model"] = {
            **block,
            "reward_kwargs": {"num_processes": workers, **block.get("reward_kwargs", {})},
        }
        values["reward"] = reward
        if not reward:  # an empty block would be an unknown key
            del values["reward"]
        report.notice(f"reward.num_workers is converted to reward_model.reward_kwargs.num_processes = {workers}.")


def convert_dict_keys(values: dict[str, Any], report: Report) -> None:
    """Convert `data.prompt_dict_keys` and `response_dict_keys` in `values` to nested column names."""
    data = values.get("data")
    if not isinstance(data, Mapping):
        return
    values["data"] = data = dict(data)
    for name in ("prompt", "response"):
        nested_keys = data.pop(f"{name}_dict_keys", None)
        if nested_keys:
            parts = [nested_keys] if isinstance(nested_keys, str) else nested_keys
            data[f"{name}_key"] = ".".join([str(data[f"{name}_key"]), *map(str, parts)])
            report.notice(f"data.{name}_dict_keys is converted to data.{name}_key={data[f'{name}_key']}.")
