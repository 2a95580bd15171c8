"""Compute the memory plan: the peak of every phase of a run on a device and on a host, before anything is loaded.

The formulas are in `planning.fsdp`, `planning.megatron`, `planning.engines` and `planning.host`. All sequences are
assumed to have the maximum length, so the plan is an upper bound. `planning.advice` checks that it fits. Parallel sizes
that do not divide the heads of a model are errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from verl.config.layout import (
    BLOCK_OF_ROLE,
    active_roles,
    actor_is_reference,
    layout_of,
    needs_reference,
    runs_in_own_process,
    serves_reward_model,
)
from verl.config.load import as_config
from verl.config.names import TRAINING_ENGINES
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, divisors
from verl.config.rollout import RolloutConfig
from verl.config.schema import get_path
from verl.config.sft import SFTConfig
from verl.config.supervised import SupervisedConfig
from verl.planning.engines import (
    DTYPE_BYTES,
    EngineFootprint,
    RewardServerMemory,
    engine_footprint,
    responses_per_batch,
    rollout_bytes,
)
from verl.planning.fsdp import FSDPModelMemory
from verl.planning.host import HostedModel, HostMemory, HostPhases, ModelMemory, decide_snapshots, host_phases
from verl.planning.megatron import MegatronModelMemory
from verl.planning.phases import (
    DEVICE_PARTS,
    GB,
    ROLE_OF_PHASE,
    DeviceMemory,
    MemoryPlan,
    PhaseMemory,
    RoleMemory,
)
from verl.planning.shapes import MegatronLayout, ModelShape
from verl.utils.buffer_sizes import MAX_GATHERED_KEYS

_ULYSSES = "ulysses_sequence_parallel_size"
_TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_KINDS = {"critic": "value", "reward_model": "sequence_classification"}
# Measured: a process on a GPU (driver context, library workspaces), and NCCL buffers if there are several ranks.
_CONTEXT, _COLLECTIVES = int(0.6 * GB), int(0.4 * GB)


def memory_plan(
    config: PPOConfig, shapes: Mapping[str, ModelShape], device: DeviceMemory | None, host: HostMemory | None = None
) -> MemoryPlan:
    """Return the plan of a resolved configuration. Raises ConfigError for parallel sizes that do not divide a model.

    `shapes` by role: actor, critic, reward_model (`judge` if it is a served causal LM), `teacher/<name>`.
    """
    check_layouts(config, shapes)
    models, reward_server = role_models(config, shapes), RewardServerMemory.from_config(config, shapes)
    phases = [_phase(config, models, reward_server, phase, device) for phase in _phases(config)]
    plan = _add_host(phases, device, host, *_hosted_models(config, models, reward_server, host))
    layouts = {name: layout_of(config, _role(name)) for name in models}
    roles = [_role_memory(name, layouts[name].pool, layouts[name].world_size, model) for name, model in models.items()]
    return replace(plan, roles=tuple(roles))


def supervised_memory_plan(
    config: SupervisedConfig, shape: ModelShape, device: DeviceMemory | None, host: HostMemory | None = None
) -> MemoryPlan:
    """Return the plan of a supervised run: training, and generation if there are validation prompts.

    Raises ConfigError for parallel sizes that do not divide the model.
    """
    check_supervised_layout(config, shape)
    data, kind, model = config.data, config.trainer.device, supervised_model(config, shape)
    rank_tokens, micro_batches = supervised_tokens(config)
    state = dict.fromkeys(DEVICE_PARTS, 0.0) | {"weights": model.weights(), "optimizer": model.moments()}
    state["context"] = _context(kind, config.ranks)
    engine = _validation_engine(config, shape, device, model.weights())
    parts = state | {"rollout": engine.graphs if engine else 0.0}
    _add(parts, model.update(rank_tokens, rank_tokens, micro_batches))
    by_phase = {"sft": parts}
    if engine is not None:
        by_phase["sft_answers"] = state | {
            "gradients": model.gradients_between_updates(),
            "gathered": _weight_sync_bytes(model, as_config(RolloutConfig, {})),
            "rollout": engine.total,
        }
    capacity = device.total if device else None
    phases = [PhaseMemory(name, "all ranks", parts, capacity) for name, parts in by_phase.items()]
    ranks = min(config.ranks, config.trainer.n_gpus_per_node)
    checkpoint = config.checkpoint
    hosted = HostedModel(model, ranks, save_contents=tuple(checkpoint.save_contents), snapshot=checkpoint.snapshot)
    batch = config.rows_per_step * data.max_length
    kept = _kept_steps(config.trainer.save_freq, config.trainer.max_ckpt_to_keep)
    plan = _add_host(phases, device, host, {"": hosted}, partial(host_phases, ranks, batch, kept, host, "sft_"))
    return replace(plan, roles=(_role_memory("model", "all ranks", config.ranks, model),))


def supervised_model(config: SupervisedConfig, shape: ModelShape) -> ModelMemory:
    """Return the model of a supervised run."""
    dynamic = config.data.use_dynamic_bsz
    return _model(config, config.model, shape, config.ranks, config.trainer.device, dynamic, config.model_kind)


def supervised_tokens(config: SupervisedConfig) -> tuple[int, int]:
    """Return (tokens of a micro-batch, number of micro-batches of a step) on one rank, with maximum lengths."""
    data, ranks_per_sequence, rows = config.data, config.ranks_per_sequence, config.max_rows_per_rank
    rows_limit = data.micro_batch_size_per_gpu * data.max_length
    limit = data.max_token_len_per_gpu * ranks_per_sequence if data.use_dynamic_bsz else rows_limit
    step_tokens = 2 * limit if rows is None else rows * data.max_length  # unbounded rows fill several micro-batches
    tokens = min(step_tokens, limit)
    return math.ceil(tokens / ranks_per_sequence), math.ceil(step_tokens / tokens)


def _validation_engine(
    config: SupervisedConfig, shape: ModelShape, device: DeviceMemory | None, resident: float
) -> EngineFootprint | None:
    """Memory of the engine that generates validation responses; None if there are no validation prompts.

    It keeps its graphs between validations.
    """
    if not isinstance(config, SFTConfig) or not config.data.val_prompt_files:
        return None
    rollout = config.rollout
    return engine_footprint(rollout, shape, rollout.max_num_seqs, config.trainer.device == "cuda", device, resident)


# Block, prefix of `use_dynamic_bsz` and prefix of the limits of the micro-batches of each phase.
_MICRO_BATCH_KEYS = {
    "old_log_prob": ("actor_rollout_ref.rollout", "log_prob_", "log_prob_"),
    "ref": ("actor_rollout_ref.ref", "log_prob_", "log_prob_"),
    "teacher": ("distillation.teacher", "log_prob_", "log_prob_"),
    "values": ("critic", "", "forward_"),
    "update_critic": ("critic", "", "ppo_"),
    "update_actor": ("actor_rollout_ref.actor", "", "ppo_"),
    "reward": ("reward_model", "", "forward_"),
}


def _has_dynamic_micro_batches(config: PPOConfig, role: str) -> bool:
    """Whether a phase of the role limits its micro-batches by tokens."""
    keys = [keys for phase, keys in _MICRO_BATCH_KEYS.items() if ROLE_OF_PHASE[phase] == role]
    return any(get_path(config, f"{path}.{prefix}use_dynamic_bsz") for path, prefix, _ in keys)


def micro_batch_sizes(config: PPOConfig, phase: str) -> tuple[int, int, int]:
    """Return (tokens, response tokens, number of micro-batches) of a phase on one rank, with maximum lengths."""
    path, dynamic_prefix, prefix = _MICRO_BATCH_KEYS[phase]
    block, layout = get_path(config, path), layout_of(config, ROLE_OF_PHASE[phase])
    longest = config.data.max_prompt_length + config.data.max_response_length
    prompts = config.data.train_batch_size
    if phase.startswith("update"):
        prompts = min(prompts, block.ppo_mini_batch_size)
    step_tokens = math.ceil(prompts * config.actor_rollout_ref.rollout.n / layout.dp_size) * longest
    dynamic = block[f"{dynamic_prefix}use_dynamic_bsz"]
    if dynamic:
        # Sequence-parallel ranks add up their budgets; a sequence over the budget is its own micro-batch.
        limit = max(longest, block[f"{prefix}max_token_len_per_gpu"] * layout.ranks_per_sequence)
    else:
        size = "micro_batch_size_per_gpu" if phase == "reward" else f"{prefix}micro_batch_size_per_gpu"
        limit = block[size] * longest
    tokens = min(step_tokens, limit)
    rank_tokens = math.ceil(tokens / layout.ranks_per_sequence)
    response_tokens = math.ceil(rank_tokens * config.data.max_response_length / longest)
    shares = get_path(config, BLOCK_OF_ROLE[ROLE_OF_PHASE[phase]]).use_prefix_grouper != "false"
    if dynamic and shares and config.trainer.device == "cuda":
        # A budget counts a shared prompt once: more of its tokens are responses. On a CPU it counts whole rows.
        group_responses = config.actor_rollout_ref.rollout.n * config.data.max_response_length
        share = group_responses / (config.data.max_prompt_length + group_responses)
        all_responses = step_tokens / layout.ranks_per_sequence * config.data.max_response_length / longest
        response_tokens = max(response_tokens, math.ceil(min(rank_tokens * share, all_responses)))
    return rank_tokens, response_tokens, math.ceil(step_tokens / tokens)


def _phases(config: PPOConfig) -> list[str]:
    roles = {*active_roles(config), *(("ref",) if needs_reference(config) else ())}
    absent = "reward" if serves_reward_model(config) else "judge"
    return [phase for phase, role in ROLE_OF_PHASE.items() if role in roles and phase != absent]


def role_models(config: PPOConfig, shapes: Mapping[str, ModelShape]) -> dict[str, ModelMemory]:
    """Return the models by role, teachers as `teacher/<name>`; with LoRA the actor is also the reference."""
    models, device, policy = {}, config.trainer.device, config.actor_rollout_ref.model
    for role in active_roles(config):
        shape = shapes.get("actor" if role == "ref" else role)
        served = role == "reward_model" and serves_reward_model(config)
        if role != "rollout" and not served and shape is not None:
            block = get_path(config, BLOCK_OF_ROLE[role])
            model = block.model if role in _KINDS else policy
            world = layout_of(config, role).world_size
            dynamic = _has_dynamic_micro_batches(config, role)
            models[role] = _model(block, model, shape, world, device, dynamic, _KINDS.get(role, "causal_lm"))
    for name in config.distillation.local_teachers:
        if (teacher := shapes.get(f"teacher/{name}")) is not None:
            world = layout_of(config, "teacher").world_size
            block = config.distillation.engine_of(name, world)
            dynamic = _has_dynamic_micro_batches(config, "teacher")
            models[f"teacher/{name}"] = _model(block, policy, teacher, world, device, dynamic)
    return models


def _role(model: str) -> str:
    """Return the role of a model; all teachers have the same one."""
    return model.partition("/")[0]


def _model(
    block: Any, model: Any, shape: ModelShape, world: int, device: str, dynamic: bool, kind: str = "causal_lm"
) -> ModelMemory:
    """Return the memory of a model with the engine settings of `block`; it is frozen if `block` has no optimizer.

    `dynamic`: its micro-batches are limited by tokens. Sharing prefixes then adds rows to a micro-batch, and attention
    copies the keys of a prefix for each of them. With a fixed number of rows there are no more keys than without
    sharing. On a CPU, attention and token limits apply to whole rows.
    """
    trains = "optim" in block
    copies_keys = dynamic and device == "cuda" and block["use_prefix_grouper"] != "false"
    if block.strategy == "megatron" and shape.core is not None:
        megatron = block.megatron_config
        return MegatronModelMemory(
            shape=shape,
            core=shape.core,
            layout=MegatronLayout.from_config(megatron, world),
            kind=kind,
            compute_bytes=DTYPE_BYTES[megatron.dtype],
            frozen=not trains,
            recompute=megatron.recompute(trains and model["enable_gradient_checkpointing"]),
            grad_offload=bool(megatron.grad_offload),
            device=device,
            bridged=bool(megatron.use_mbridge),
        )
    fsdp = block["fsdp_config"]
    return FSDPModelMemory(
        shape=shape,
        kind=kind,
        compute_bytes=DTYPE_BYTES[fsdp.mixed_precision],
        shards=world if fsdp.fsdp_size in (-1, 0, None) else min(fsdp.fsdp_size, world),
        frozen=not trains,
        checkpointing=trains and model["enable_gradient_checkpointing"],
        compiled=trains and block["use_torch_compile"] and device == "cuda",
        reshard=fsdp.reshard_after_forward,
        moment_bytes=DTYPE_BYTES[block["optim"].state_dtype] if trains else 4,
        grad_offload=trains and bool(fsdp.grad_offload),
        saved_keys_per_token=MAX_GATHERED_KEYS if copies_keys else 1.0,
        device=device,
    )


def _phase(
    config: PPOConfig,
    models: Mapping[str, ModelMemory],
    reward_server: RewardServerMemory | None,
    phase: str,
    device: DeviceMemory | None,
) -> PhaseMemory:
    role = ROLE_OF_PHASE[phase]
    if phase == "ref" and actor_is_reference(config):
        role = "actor"
    layout = layout_of(config, role)
    # Teachers run one at a time: plan for the largest.
    role = max((name for name in models if _role(name) == role), key=lambda name: models[name].weights(), default=role)
    parts = dict.fromkeys(DEVICE_PARTS, 0.0)
    for other, model in models.items():
        if layout_of(config, _role(other)).pool == layout.pool:
            _add(parts, _resident_state(config, _role(other), model, phase, computes=other == role))
    if layout_of(config, "rollout").pool == layout.pool and "actor" in models:
        resident = sum(
            model.weights() for name, model in models.items() if _keeps_weights(config, _role(name), layout.pool)
        )
        parts["rollout"] += rollout_bytes(config, models["actor"].shape, phase, device, resident)
        if phase == "gen":
            parts["gathered"] += _weight_sync_bytes(models["actor"], config.actor_rollout_ref.rollout)
    if role in models:
        tokens, response_tokens, micro_batches = micro_batch_sizes(config, phase)
        if phase.startswith("update"):
            _add(parts, models[role].update(tokens, response_tokens, micro_batches))
        else:
            _add(parts, models[role].inference(tokens, response_tokens))
    if reward_server is not None and layout_of(config, "reward_model").pool == layout.pool:
        parts["judge"] = reward_server.bytes(phase, device)
    parts["context"] = _context(config.trainer.device, layout.world_size)
    return PhaseMemory(phase, layout.pool, parts, device.total if device else None)


def _add_host(
    phases: list[PhaseMemory],
    device: DeviceMemory | None,
    host: HostMemory | None,
    hosted: Mapping[str, HostedModel],
    host_phases_of: HostPhases,
) -> MemoryPlan:
    """Return the plan of device phases and the host phases of models, which are named by their config blocks."""
    decided = dict(zip(hosted, decide_snapshots(list(hosted.values()), host_phases_of), strict=True))
    missing = {block: model.missing for block, model in decided.items() if model.save_contents}
    installed, used = (None, 0) if host is None else (host.installed, host.used)
    checkpoint = {block: model.file_bytes() for block, model in decided.items() if model.save_contents}
    all_phases = (*phases, *host_phases_of(list(decided.values())))
    return MemoryPlan(all_phases, device, missing, installed, used, checkpoint)


def _role_memory(role: str, pool: str, ranks: int, model: ModelMemory) -> RoleMemory:
    parameters = (model.shape.parameters, model.trained_parameters)
    gradients = 0.0 if model.frozen else model.gradients()
    return RoleMemory(role, pool, ranks, *parameters, model.weights(), model.moments(), gradients)


def _hosted_models(
    config: PPOConfig,
    models: Mapping[str, ModelMemory],
    reward_server: RewardServerMemory | None,
    host: HostMemory | None,
) -> tuple[dict[str, HostedModel], HostPhases]:
    """Return the models by config block on a node that has ranks of every role, and the function that returns
    its host phases."""
    trainer = config.trainer
    ranks = {role: min(trainer.n_gpus_per_node, layout_of(config, role).world_size) for role in active_roles(config)}
    hosted = {}
    for name, model in models.items():
        block = get_path(config, BLOCK_OF_ROLE[_role(name)])
        contents = () if model.frozen else tuple(block.checkpoint.save_contents)
        snapshot = None if model.frozen else block.checkpoint.snapshot
        engine = _engine(block)
        optimizer_offload = engine.optimizer_offload and not model.frozen
        block_name = name.replace(_role(name), BLOCK_OF_ROLE[_role(name)], 1)
        hosted[block_name] = HostedModel(
            model, ranks[_role(name)], engine.param_offload, optimizer_offload, contents, snapshot
        )
    if reward_server is not None:
        hosted["reward_model"] = HostedModel(
            reward_server.model(), ranks["reward_model"], param_offload=reward_server.is_offloaded
        )
    processes = sum({layout_of(config, role).pool: count for role, count in ranks.items()}.values())
    if runs_in_own_process(config.actor_rollout_ref.rollout):
        processes += ranks["rollout"]
    batch = responses_per_batch(config) * (config.data.max_prompt_length + config.data.max_response_length)
    kept = _kept_steps(trainer.save_freq, trainer.max_actor_ckpt_to_keep)
    return hosted, partial(host_phases, processes, batch, kept, host, "")


def _weight_sync_bytes(model: ModelMemory, rollout: RolloutConfig) -> float:
    """Buffers of a weight sync on the trainer's side; 0 on the fsdp engine."""
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20
    return model.weight_sync_bytes(bucket) if isinstance(model, MegatronModelMemory) else 0.0


def _kept_steps(save_freq: int | None, kept: int | None) -> int:
    """Minimum number of checkpoints that exist at the same time."""
    return 1 if save_freq is not None and save_freq <= 0 else 1 + (kept or 1)


def _keeps_weights(config: PPOConfig, role: str, pool: str) -> bool:
    """Whether the weights of a role stay on the devices of a pool between its phases."""
    return layout_of(config, role).pool == pool and not _engine(get_path(config, BLOCK_OF_ROLE[role])).param_offload


def _resident_state(config: PPOConfig, role: str, model: ModelMemory, phase: str, computes: bool) -> dict[str, float]:
    """State of a role on the device in a phase; offloaded state is there only in phases in which the role computes."""
    engine, updates = _engine(get_path(config, BLOCK_OF_ROLE[role])), phase == f"update_{role}"
    on_cpu = config.trainer.device == "cpu"  # nothing is offloaded
    has_weights = computes or on_cpu or not engine.param_offload
    has_moments = updates or on_cpu or not engine.optimizer_offload
    return {
        "weights": model.weights() if has_weights else 0.0,
        "optimizer": model.moments() if has_moments else 0.0,
        "gradients": 0.0 if updates else model.gradients_between_updates(),
    }


def _engine(block: Any) -> Any:
    """Return the engine settings of a role's block."""
    return block[TRAINING_ENGINES[block.strategy].block]


def _context(device: str, ranks: int) -> float:
    if device != "cuda":
        return 0.0
    return float(_CONTEXT + (_COLLECTIVES if ranks > 1 else 0))


def _add(parts: dict[str, float], more: Mapping[str, float]) -> None:
    for name, size in more.items():
        parts[name] += size


def check_layouts(config: PPOConfig, shapes: Mapping[str, ModelShape]) -> None:
    """Raise ConfigError for a Ulysses or tensor-parallel size that does not divide its model; `shapes` by role as in
    `memory_plan`. Sizes of the megatron engine are checked with the configuration."""
    report = Report()
    for role in active_roles(config):
        if role == "rollout":
            _check_rollout(config, shapes.get("actor"), report)
        elif role != "reward_model" or not serves_reward_model(config):
            path = BLOCK_OF_ROLE[role]
            block = get_path(config, path)
            for name, shape in shapes.items():
                if name.partition("/")[0] == ("actor" if role == "ref" else role) and block.strategy != "megatron":
                    _check_heads(f"{path}.{_ULYSSES}", block[_ULYSSES], shape, report)
    report.raise_if_any()


def check_supervised_layout(config: SupervisedConfig, shape: ModelShape) -> None:
    """The same as `check_layouts` for a supervised run."""
    report = Report()
    if config.strategy != "megatron":
        _check_heads(_ULYSSES, config.ulysses_sequence_parallel_size, shape, report)
    report.raise_if_any()


def _check_rollout(config: PPOConfig, shape: ModelShape | None, report: Report) -> None:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    if shape is None or rollout.server_urls:
        return
    _check_heads(_TENSOR_PARALLEL, size, shape, report)
    key_heads_fit = max(size, shape.kv_heads) % min(size, shape.kv_heads) == 0
    if rollout.name == "native" and not key_heads_fit and not report.problems:
        why = f"the model has {shape.kv_heads} key heads; one of the two numbers must divide the other"
        report.problem(_TENSOR_PARALLEL, size, why, f"Use one of {', '.join(map(str, divisors(shape.kv_heads)))}")


def _check_heads(key: str, size: int, shape: ModelShape, report: Report) -> None:
    if shape.heads % size:
        why = f"does not divide the {shape.heads} attention heads of the model"
        report.problem(key, size, why, f"Use one of {', '.join(map(str, divisors(shape.heads)))}")
