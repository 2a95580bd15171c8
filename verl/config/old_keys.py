"""Keys of other versions: ignored with a notice, accepted with a fixed value, or converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.problems import Report


class FixedValue(NamedTuple):
    """A key of other versions that is accepted with one value only."""

    value: Any
    why: str
    """Why other values are not supported."""
    fix: str


_ROLLOUT = "actor_rollout_ref.rollout"
_BATCH_SIZE, _MINI_BATCH_SIZE = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
_THRESHOLD, _TOTAL_PROMPTS = "async_training.staleness_threshold", "rollout.total_rollout_steps"
# Their product is the number of prompts of a training step in asynchronous training; missing factors count as 1.
_OLD_FACTORS = ("async_training.require_batches", "async_training.trigger_parameter_sync_step")
_PROMPTS_PER_STEP = (*_OLD_FACTORS, _MINI_BATCH_SIZE)
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
    "*.model.external_lib": "external_libs replaces it",
    "critic.model.tokenizer_path": "the critic uses the actor's tokenizer",
    "*.model.use_shm": "each node reads the weights once, and its processes share them",
    "*.model.fsdp_config": "fsdp_config of the role replaces it",
    "*.enable_activation_offload": "gradient checkpointing replaces it",
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
    "*fsdp_config.offload_policy": "param_offload and optimizer_offload replace it",
    "*fsdp_config.cpu_offload": "grad_offload and optim.state_dtype=bf16 reduce memory instead",
    "*fsdp_config.offload_params": "grad_offload and optim.state_dtype=bf16 reduce memory instead",
    "*.fsdp_config.use_orig_params": "fully_shard always uses the original parameters",
    "*fsdp_config.model_dtype": "master weights are fp32; mixed_precision sets the compute precision",
    "*.fsdp_config.use_torch_compile": "actor_rollout_ref.actor.use_torch_compile replaces it",
    "*.fsdp_config.forward_only": "each role determines whether it trains",
    "*.fsdp_config.strategy": "strategy of the role replaces it",
    "actor_rollout_ref.ref.fsdp_config.gradient_checkpointing": "the reference has no backward pass",
    "actor_rollout_ref.ref.megatron_config.router_replay": "only the actor replays the routing of experts",
    "critic.megatron_config.router_replay": "only the actor replays the routing of experts",
    "reward_model.megatron_config.router_replay": "only the actor replays the routing of experts",
    "*.checkpoint.async_save": "checkpoints are written in the background",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length replaces it",
    "actor_rollout_ref.rollout.disable_log_stats": "engine statistics are part of the metrics",
    "actor_rollout_ref.rollout.calculate_log_probs": "rollout log-probs are always returned",
    "actor_rollout_ref.rollout.layered_summon_param": "weights are synced in buckets",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "weights and KV cache are always restored separately",
    "actor_rollout_ref.rollout.swap_space": "preempted sequences are recomputed",
    "actor_rollout_ref.rollout.data_parallel_size": "the number of replicas is devices / tensor_model_parallel_size",
    "actor_rollout_ref.rollout.enable_sleep_mode": "free_cache_engine and free_weights replace it",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "the transport is selected by the placement of the engine",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "engines receive and return token ids",
    "data.return_raw_input_ids": "raw prompts are kept if a role needs them",
    "data.return_full_prompt": "raw prompts are kept if a role needs them",
    "data.filter_overlong_prompts_workers": "tokenising runs in parallel and is cached",
    "data.validation_shuffle": "validation keeps the order of the file",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code replaces it",
    "data.tokenizer": "the tokenizer is loaded from actor_rollout_ref.model.path",
    "data.pad_mode": "model.use_remove_padding replaces it",
    "data.balance_dp_token": "tokens are always balanced over ranks",
    "data.use_shm": "files are read once and cached",
    "reward_model.rollout.prompt_length": "max_model_len replaces it",
    "reward_model.rollout.response_length": "the length is part of each request",
    "reward_model.rollout.free_cache_engine": "the reward model is offloaded while it is idle on shared devices",
    "reward_model.rollout.skip_tokenizer_init": "the reward model reads messages, which it tokenizes itself",
    "reward_model.launch_reward_fn_async": "scoring always overlaps generation",
    "trainer.del_local_ckpt_after_load": "max_actor_ckpt_to_keep replaces it",
    "trainer.remove_previous_ckpt_in_save": "max_actor_ckpt_to_keep replaces it",
    "trainer.esi_redundant_time": "trainer.save_within replaces it",
    "trainer.ray_wait_register_center_timeout": "workers connect through Ray",
    "trainer.use_legacy_worker_impl": "there is only one implementation of workers",
    "async_training.require_batches": "data.train_batch_size is the number of prompts per step",
    "async_training.trigger_parameter_sync_step": "weights are synced after every step",
    "async_training.use_trainer_do_validate": "validation runs concurrently with training",
    "trainer.v1.separate_async.parameter_sync_step": "weights are synced after every step",
    "trainer.profile_*": "per-phase timing is always on",
    "*_nsight_options": "per-phase timing is always on",
    "*profiler": "per-phase timing is always on",
    "ray_init.timeline_json_file": "per-phase timing is always on",
    "ray_kwargs": "ray_init.num_cpus replaces it",
    "*._target_": "blocks have fixed types",
}


def why_obsolete(path: str) -> str | None:
    """Return why the key at `path` is obsolete; None if it is not."""
    return next((reason for pattern, reason in OBSOLETE.items() if fnmatchcase(path, pattern)), None)


def convert_async_training(values: dict[str, Any], report: Report) -> None:
    """Convert `async_training.*` and `rollout.total_rollout_steps` in `values`, which use other units.

    Each key is converted if the values that it depends on are valid.
    """
    number = partial(_read_number, dict(values), report)
    threshold = _pop_old_key(values, _THRESHOLD, report)
    total_prompts = _pop_old_key(values, _TOTAL_PROMPTS, report)
    if threshold is not None and (staleness := number(_THRESHOLD, lambda value: math.ceil(float(value)))) is not None:
        _set_converted(values, report, _THRESHOLD, "trainer", max_staleness=staleness)
    batch_size = number(_BATCH_SIZE)
    factors = [number(key) for key in _PROMPTS_PER_STEP]
    if "async_training" in values and batch_size == 0 and None not in factors:
        batch_size = math.prod(factor or 1 for factor in factors)
        _set_converted(values, report, f"{_BATCH_SIZE}=0", "data", train_batch_size=batch_size, gen_batch_size=None)
    if total_prompts is not None and (total := number(_TOTAL_PROMPTS)) is not None and batch_size is not None:
        steps = total // max(1, batch_size)
        if steps >= 1:
            _set_converted(values, report, _TOTAL_PROMPTS, "trainer", total_training_steps=steps)
        else:
            why = f"a step needs more prompts ({_BATCH_SIZE} = {batch_size})"
            report.problem(_TOTAL_PROMPTS, total, why, f"Set it to {batch_size} or more")
    for name in ("async_training", "rollout"):
        if values.get(name) == {}:  # an empty block would be an unknown key
            del values[name]


def _pop_old_key(values: dict[str, Any], key: str, report: Report) -> Any:
    """Remove and return the value of `key`, `block.name`; None if there is none. Report and remove a block that is not
    a mapping."""
    name, _, below = key.partition(".")
    if not isinstance(values.get(name), Mapping | None):
        report.problem(name, values.pop(name), "is not a block", f"Set keys below it, or leave out {name}")
    if name not in values:
        return None
    values[name] = block = dict(_mapping(values, name))
    return block.pop(below, None)


def _whole_number(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(f"{value} is not a whole number")
    return int(number)


def _read_number(
    values: Mapping[str, Any], report: Report, key: str, kind: Callable[[Any], int] = _whole_number
) -> int | None:
    """Return the value of `key` in `values`, with `${…}` resolved, as a number. A missing value counts as 0; one of
    the keys to convert as None.

    Returns None if it is not a number, and reports that unless the key belongs to the schema: its type is checked with
    the other keys.
    """
    value: Any = values
    for name in key.split("."):
        if not (isinstance(value, str) and "${" in value):  # else an interpolation of the block
            value = value.get(name) if isinstance(value, Mapping) else None
    is_popped = key in (_THRESHOLD, _TOTAL_PROMPTS)
    try:
        if "${" in str(value):
            value = OmegaConf.select(OmegaConf.create(dict(values)), key, throw_on_missing=True)
        if value is None:
            return None if is_popped else 0
        return kind(value)
    except OmegaConfBaseException as error:
        if is_popped and error.full_key in (key, None):  # other keys are reported when all are resolved
            why = f"cannot be resolved ({str(error).splitlines()[0].strip()})"
            report.problem(key, value, why, "Correct the expression in ${…}, or set a number")
    except (TypeError, ValueError, OverflowError):
        if is_popped or key in _OLD_FACTORS:
            report.problem(key, value, "is not a number", "Set a number, or leave it out")
    return None


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a block of `values`; {} if it is not a block, which is reported elsewhere."""
    block = values.get(name)
    return block if isinstance(block, Mapping) else {}


def _set_converted(values: dict[str, Any], report: Report, old_key: str, block: str, **keys: Any) -> None:
    """Set `keys` in a block of `values`, and report that `old_key` is converted to the first of them.

    Does nothing if there is another value in place of the block, which is reported elsewhere.
    """
    if isinstance(values.get(block), str) and "${" in values[block]:
        name, value = next(iter(keys.items()))
        why = f"cannot be converted to {block}.{name}, because {block} is an interpolation"
        report.problem(old_key, value, why, f"Remove it, and set {name}={value} in that block")
    if not isinstance(values.get(block), Mapping | None):
        return
    values[block] = {**_mapping(values, block), **keys}
    name, value = next(iter(keys.items()))
    report.record_alias(f"{block}.{name}", old_key)
    report.notice(f"{old_key} is converted to {block}.{name} = {value}.")


def convert_reward_workers(values: dict[str, Any], report: Report) -> None:
    """Convert `reward.num_workers` in `values` to an argument of the reward manager."""
    reward = dict(_mapping(values, "reward"))
    workers = reward.pop("num_workers", None)
    if workers is None:
        return
    values["reward"] = reward
    if not reward:  # an empty block would be an unknown key
        del values["reward"]
    block, new_key = _mapping(values, "reward_model"), "reward_model.reward_kwargs.num_processes"
    if all(
        isinstance(existing, Mapping | None) for existing in (values.get("reward_model"), block.get("reward_kwargs"))
    ):
        kwargs = {"num_processes": workers, **_mapping(block, "reward_kwargs")}
        values["reward_model"] = {**block, "reward_kwargs": kwargs}
        report.notice(f"reward.num_workers is converted to {new_key} = {workers}.")
    else:
        why = "cannot be added to reward_model.reward_kwargs, which is not a mapping"
        report.problem("reward.num_workers", workers, why, f"Set {new_key}={workers} instead")


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
            if not isinstance(parts, list):
                fix = f"Set a list of names, or data.{name}_key with dots"
                report.problem(f"data.{name}_dict_keys", nested_keys, "is not a list of names", fix)
                continue
            data[f"{name}_key"] = ".".join([str(data[f"{name}_key"]), *map(str, parts)])
            report.notice(f"data.{name}_dict_keys is converted to data.{name}_key={data[f'{name}_key']}.")
