"""The memory plan: what every phase of a run takes of a device and of a host, before anything is loaded.

Formulas are those of `planning.costs` and `planning.megatron`; sequences are taken to be as long as they may get, so it
is an upper bound for shorter ones. Refusals and their remedies: `planning.advice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.config.layout import (
    BLOCK_OF_ROLE,
    active_roles,
    actor_is_reference,
    layout_of,
    needs_reference,
    serves_reward_model,
)
from verl.config.load import as_config
from verl.config.names import TRAINING_ENGINES
from verl.config.ppo import PPOConfig
from verl.config.rollout import RolloutConfig
from verl.config.schema import pick
from verl.config.sft import SFTConfig
from verl.config.supervised import SupervisedConfig
from verl.planning.core_shapes import CoreSizes
from verl.planning.costs import TrainedModel
from verl.planning.engines import BYTES, EngineParts, beside, engine_bytes, engine_parts, samples
from verl.planning.host import Held, HostMemory, HostPhases, PlannedModel, host_phases, with_snapshots
from verl.planning.judge import Judge
from verl.planning.megatron import CoreModel
from verl.planning.phases import DEVICE_PARTS, GB, ROLE_OF_PHASE, DeviceMemory, MemoryPlan, PhaseMemory
from verl.planning.shapes import ModelShape

_KINDS = {"critic": "value", "reward_model": "sequence_classification"}
# Measured: a process on a GPU (driver context, library workspaces), and buffers of nccl where ranks work together.
_CONTEXT, _COLLECTIVES = int(0.6 * GB), int(0.4 * GB)


def memory_plan(
    config: PPOConfig, shapes: Mapping[str, ModelShape], device: DeviceMemory | None, host: HostMemory | None = None
) -> MemoryPlan:
    """Of a resolved configuration. `shapes` by role: actor, and critic, reward_model where there are such roles; those
    of teachers are called `teacher/<name>`, that of a reward model that writes `judge`.

    `host`: a node's own memory.
    """
    models, judge = _models(config, shapes), Judge.of(config, shapes)
    phases = [_phase(config, models, judge, phase, device) for phase in _phases(config)]
    return _with_host(phases, device, host, *_host(config, models, judge, host))


def supervised_memory_plan(
    config: SupervisedConfig, shape: ModelShape, device: DeviceMemory | None, host: HostMemory | None = None
) -> MemoryPlan:
    """Of a supervised run: training, and answers to prompts where a validation asks for them."""
    data, sharing, kind = config.data, config.sharing, config.trainer.device
    model = _model(config, config.model, shape, config.ranks, kind, config.model_kind)
    by_rows = data.micro_batch_size_per_gpu * data.max_length
    wanted = data.max_token_len_per_gpu * sharing if data.use_dynamic_bsz else by_rows
    rows = config.most_rows_per_rank
    most = 2 * wanted if rows is None else rows * data.max_length  # rows without a bound fill several micro-batches
    tokens = min(most, wanted)
    share = math.ceil(tokens / sharing)
    here = dict.fromkeys(DEVICE_PARTS, 0.0) | {"weights": model.weights(), "optimizer": model.moments()}
    here["context"] = _context(kind, config.ranks)
    engine = _answering(config, shape, device, model.weights())
    parts = here | {"rollout": engine.graphs if engine else 0.0}
    _add(parts, model.update(share, share, math.ceil(most / tokens)))
    by_phase = {"sft": parts}
    if engine is not None:
        by_phase["sft_answers"] = here | {
            "gradients": model.resting_gradients(),
            "gathered": _on_their_way(model, as_config(RolloutConfig, {})),
            "rollout": engine.total,
        }
    room = device.total if device else None
    phases = [PhaseMemory(name, "all ranks", parts, room) for name, parts in by_phase.items()]
    ranks = min(config.ranks, config.trainer.n_gpus_per_node)
    checkpoint = config.checkpoint
    held = Held(model, ranks, saved=tuple(checkpoint.save_contents), snapshot=checkpoint.snapshot)
    batch = config.rows_per_step * data.max_length
    kept = _kept_steps(config.trainer.save_freq, config.trainer.max_ckpt_to_keep)
    return _with_host(phases, device, host, {"": held}, partial(host_phases, ranks, batch, kept, host, "sft_"))


def _answering(
    config: SupervisedConfig, shape: ModelShape, device: DeviceMemory | None, resting: float
) -> EngineParts | None:
    """The engine that answers prompts of a validation, and is opened with the first; between these it keeps its
    graphs."""
    if not isinstance(config, SFTConfig) or not config.data.val_prompt_files:
        return None
    rollout = config.rollout
    return engine_parts(rollout, shape, rollout.max_num_seqs, config.trainer.device == "cuda", device, resting)


def micro_batch_tokens(config: PPOConfig, phase: str) -> tuple[int, int, int]:
    """(tokens, answer tokens, how many there are) of a pass on one rank, at the longest sequences."""
    sizes = {
        "old_log_prob": ("actor_rollout_ref.rollout", "log_prob_", "log_prob_"),
        "ref": ("actor_rollout_ref.ref", "log_prob_", "log_prob_"),
        "teacher": ("distillation.teacher", "log_prob_", "log_prob_"),
        "values": ("critic", "", "forward_"),
        "update_critic": ("critic", "", "ppo_"),
        "update_actor": ("actor_rollout_ref.actor", "", "ppo_"),
        "reward": ("reward_model", "", "forward_"),
    }
    path, dynamic_prefix, prefix = sizes[phase]
    block, layout = pick(config, path), layout_of(config, ROLE_OF_PHASE[phase])
    longest = config.data.max_prompt_length + config.data.max_response_length
    prompts = config.data.train_batch_size
    if phase.startswith("update"):
        prompts = min(prompts, block.ppo_mini_batch_size)
    most = math.ceil(prompts * config.actor_rollout_ref.rollout.n / layout.dp_size) * longest
    if block[f"{dynamic_prefix}use_dynamic_bsz"]:
        # Ranks that share every sequence pool their budgets, and a sequence over the budget goes alone.
        wanted = max(longest, block[f"{prefix}max_token_len_per_gpu"] * layout.sharing)
    else:
        size = "micro_batch_size_per_gpu" if phase == "reward" else f"{prefix}micro_batch_size_per_gpu"
        wanted = block[size] * longest
    tokens = min(most, wanted)
    share = math.ceil(tokens / layout.sharing)
    return share, math.ceil(share * config.data.max_response_length / longest), math.ceil(most / tokens)


def _phases(config: PPOConfig) -> list[str]:
    roles = {*active_roles(config), *(("ref",) if needs_reference(config) else ())}
    other = "reward" if serves_reward_model(config) else "judge"
    return [phase for phase, role in ROLE_OF_PHASE.items() if role in roles and phase != other]


def _models(config: PPOConfig, shapes: Mapping[str, ModelShape]) -> dict[str, PlannedModel]:
    """The models of the run by role, each teacher under its own name; with LoRA the actor is the reference too."""
    models, device, policy = {}, config.trainer.device, config.actor_rollout_ref.model
    for role in active_roles(config):
        shape = shapes.get("actor" if role == "ref" else role)
        served = role == "reward_model" and serves_reward_model(config)
        if role != "rollout" and not served and shape is not None:
            block = pick(config, BLOCK_OF_ROLE[role])
            model = block.model if role in _KINDS else policy
            world = layout_of(config, role).world_size
            models[role] = _model(block, model, shape, world, device, _KINDS.get(role, "causal_lm"))
    for name in config.distillation.local_teachers:
        if (teacher := shapes.get(f"teacher/{name}")) is not None:
            world = layout_of(config, "teacher").world_size
            block = config.distillation.engine_of(name, world)
            models[f"teacher/{name}"] = _model(block, policy, teacher, world, device)
    return models


def _role(model: str) -> str:
    """The role of a model, which several teachers share."""
    return model.partition("/")[0]


def _model(block: Any, model: Any, shape: ModelShape, world: int, device: str, kind: str = "causal_lm") -> PlannedModel:
    """Of a block with an optimizer one that learns, else a frozen one."""
    learns = "optim" in block
    if block.strategy == "megatron" and shape.core is not None:
        megatron = block.megatron_config
        return CoreModel(
            shape=shape,
            core=shape.core,
            sizes=CoreSizes.of(megatron, world),
            kind=kind,
            compute_bytes=BYTES[megatron.dtype],
            frozen=not learns,
            recompute=megatron.recompute(learns and model["enable_gradient_checkpointing"]),
            grad_offload=bool(megatron.grad_offload),
            device=device,
            bridged=bool(megatron.use_mbridge),
        )
    fsdp = block["fsdp_config"]
    return TrainedModel(
        shape=shape,
        kind=kind,
        compute_bytes=BYTES[fsdp.mixed_precision],
        shards=world if fsdp.fsdp_size in (-1, 0, None) else min(fsdp.fsdp_size, world),
        frozen=not learns,
        checkpointing=learns and model["enable_gradient_checkpointing"],
        compiled=learns and block["use_torch_compile"] and device == "cuda",
        reshard=fsdp.reshard_after_forward,
        state_bytes=BYTES[block["optim"].state_dtype] if learns else 4,
        grad_offload=learns and bool(fsdp.grad_offload),
        device=device,
    )


def _phase(
    config: PPOConfig,
    models: Mapping[str, PlannedModel],
    judge: Judge | None,
    phase: str,
    device: DeviceMemory | None,
) -> PhaseMemory:
    role = ROLE_OF_PHASE[phase]
    if phase == "ref" and actor_is_reference(config):
        role = "actor"
    layout = layout_of(config, role)
    # Of several teachers one works at a time: the largest is what must fit.
    role = max((name for name in models if _role(name) == role), key=lambda name: models[name].weights(), default=role)
    parts = dict.fromkeys(DEVICE_PARTS, 0.0)
    for other, model in models.items():
        if layout_of(config, _role(other)).pool == layout.pool:
            _add(parts, _at_rest(config, _role(other), model, phase, working=other == role))
    if layout_of(config, "rollout").pool == layout.pool and "actor" in models:
        resting = sum(
            model.weights() for name, model in models.items() if _rests_here(config, _role(name), layout.pool)
        )
        parts["rollout"] += engine_bytes(config, models["actor"].shape, phase, device, resting)
        if phase == "gen":
            parts["gathered"] += _on_their_way(models["actor"], config.actor_rollout_ref.rollout)
    if role in models:
        tokens, answers, passes = micro_batch_tokens(config, phase)
        model = models[role]
        updates = phase.startswith("update")
        _add(parts, model.update(tokens, answers, passes) if updates else model.inference(tokens, answers))
    if judge is not None and layout_of(config, "reward_model").pool == layout.pool:
        parts["judge"] = judge.bytes(phase, device)
    parts["context"] = _context(config.trainer.device, layout.world_size)
    return PhaseMemory(phase, layout.pool, parts, device.total if device else None)


def _with_host(
    phases: list[PhaseMemory],
    device: DeviceMemory | None,
    host: HostMemory | None,
    held: Mapping[str, Held],
    phases_of: HostPhases,
) -> MemoryPlan:
    """The plan of a device's phases and of what a host holds, by block."""
    settled = dict(zip(held, with_snapshots(list(held.values()), phases_of), strict=True))
    missing = {block: role.missing for block, role in settled.items() if role.saved}
    whole = (None, 0) if host is None else (host.installed, host.used)
    return MemoryPlan((*phases, *phases_of(list(settled.values()))), device, missing, *whole)


def _host(
    config: PPOConfig, models: Mapping[str, PlannedModel], judge: Judge | None, host: HostMemory | None
) -> tuple[dict[str, Held], HostPhases]:
    """Of the node that has a rank of every role: what it holds by block, and the phases of that."""
    trainer = config.trainer
    ranks = {role: min(trainer.n_gpus_per_node, layout_of(config, role).world_size) for role in active_roles(config)}
    held = {}
    for name, model in models.items():
        block = pick(config, BLOCK_OF_ROLE[_role(name)])
        saved = () if model.frozen else tuple(block.checkpoint.save_contents)
        copied = None if model.frozen else block.checkpoint.snapshot
        engine = _engine(block)
        moments_away = engine.optimizer_offload and not model.frozen
        at = name.replace(_role(name), BLOCK_OF_ROLE[_role(name)], 1)
        held[at] = Held(model, ranks[_role(name)], engine.param_offload, moments_away, saved, copied)
    if judge is not None:
        held["reward_model"] = Held(judge.model(), ranks["reward_model"], param_offload=judge.parks)
    processes = sum({layout_of(config, role).pool: count for role, count in ranks.items()}.values())
    if beside(config.actor_rollout_ref.rollout):
        processes += ranks["rollout"]
    batch = samples(config) * (config.data.max_prompt_length + config.data.max_response_length)
    kept = _kept_steps(trainer.save_freq, trainer.max_actor_ckpt_to_keep)
    return held, partial(host_phases, processes, batch, kept, host, "")


def _on_their_way(model: PlannedModel, rollout: RolloutConfig) -> float:
    """Weights in a hand-over, on the megatron engine."""
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20
    return model.on_their_way(bucket) if isinstance(model, CoreModel) else 0.0


def _kept_steps(save_freq: int | None, kept: int | None) -> int:
    """Checkpoints that lie side by side at least."""
    return 1 if save_freq is not None and save_freq <= 0 else 1 + (kept or 1)


def _rests_here(config: PPOConfig, role: str, pool: str) -> bool:
    """Whether a role's weights stay on the pool's devices between its phases."""
    return layout_of(config, role).pool == pool and not _engine(pick(config, BLOCK_OF_ROLE[role])).param_offload


def _at_rest(config: PPOConfig, role: str, model: PlannedModel, phase: str, working: bool) -> dict[str, float]:
    """What a role holds although, or while, this phase runs: what is offloaded is here only for its own."""
    engine, updates = _engine(pick(config, BLOCK_OF_ROLE[role])), phase == f"update_{role}"
    on_cpu = config.trainer.device == "cpu"  # the host is the device: nothing is offloaded to anywhere
    weights_here = working or on_cpu or not engine.param_offload
    moments_here = updates or on_cpu or not engine.optimizer_offload
    return {
        "weights": model.weights() if weights_here else 0.0,
        "optimizer": model.moments() if moments_here else 0.0,
        "gradients": 0.0 if updates else model.resting_gradients(),
    }


def _engine(block: Any) -> Any:
    """The keys of the engine that a role's block names."""
    return block[TRAINING_ENGINES[block.strategy].block]


def _context(device: str, ranks: int) -> float:
    if device != "cuda":
        return 0.0
    return float(_CONTEXT + (_COLLECTIVES if ranks > 1 else 0))


def _add(parts: dict[str, float], more: Mapping[str, float]) -> None:
    for name, size in more.items():
        parts[name] += size
