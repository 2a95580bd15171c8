"""Check before models are loaded that a run fits into memory, and log its plan; `trainer.auto_memory` makes it fit.

Sharing of prefixes is disabled for models that do not support it.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.config import PPOConfig, SupervisedConfig
from verl.config.context_length import read_model_config
from verl.config.devices import gpu_memory, host_memory_available, host_memory_total
from verl.config.layout import BLOCK_OF_ROLE, MODEL_OF_ROLE, active_roles, serves_reward_model
from verl.config.megatron import roles_on_megatron
from verl.config.problems import Report
from verl.config.schema import get_path, set_path
from verl.config.trainer import RunConfig
from verl.models.megatron_core import CoreArchitecture
from verl.planning.advice import apply_memory_settings, check_fits
from verl.planning.catalog import known_name, known_shape, model_shape
from verl.planning.host import HostMemory, is_in_memory
from verl.planning.phases import GB, DeviceMemory, MemoryPlan
from verl.planning.plan import memory_plan, supervised_memory_plan
from verl.planning.shapes import ModelShape
from verl.utils.console import FULL
from verl.utils.fs import expand_path, resolve_model_path

if TYPE_CHECKING:
    from verl.models.loading import ModelKind

# Ray kills workers when 95 % of the host memory are in use.
RESERVED = 0.05
_SHARING = "use_prefix_grouper"
_CLASSIFIER: ModelKind = "sequence_classification"

logger = logging.getLogger(__name__)


def check_memory(config: PPOConfig, folders: Mapping[str, str] | None = None) -> MemoryPlan | None:
    """Log and return the plan of a run; raise ConfigError if it cannot fit. None if the shape of the actor is unknown.

    With `trainer.auto_memory` the cheapest changes that make it fit are applied to `config` first. `folders`: local
    folders of models, by hub name or URL.
    """
    check_megatron_support(config, folders or {})
    shapes, missing = model_shapes(config, folders or {})
    if "actor" not in shapes:
        _log(decide_partial_kv(config, None))
        return None
    for role in missing:
        logger.info("memory plan: without the %s, because its model is not on this machine", role)
    exclude_shared_prefixes(config, shapes)
    device, host = available_memory(config.trainer)

    def plan_of(changed: PPOConfig) -> MemoryPlan:
        return memory_plan(changed, shapes, device, host)

    _log(decide_partial_kv(config, plan_of))
    return _check(config, plan_of)


def decide_partial_kv(config: PPOConfig, plan_of: Callable[[PPOConfig], MemoryPlan] | None) -> list[str]:
    """Replace `trainer.partial_kv=auto`: keep the KV cache of unfinished responses during updates if it fits. Return
    the decision with its reason as text; [] if there is none. `plan_of`: None if there is no plan."""
    if config.trainer.partial_kv != "auto":
        return []
    obstacle = "the memory of the run is unknown" if plan_of is None else _excess_with_kept_kv(config, plan_of)
    config.trainer.partial_kv = "keep" if obstacle is None else "recompute"
    reason = obstacle or "the KV cache of unfinished responses fits during updates"
    return [f"trainer.partial_kv=auto: {config.trainer.partial_kv}, because {reason}."]


def _log(messages: Sequence[str]) -> None:
    for message in messages:
        logger.info(message)


def _excess_with_kept_kv(config: PPOConfig, plan_of: Callable[[PPOConfig], MemoryPlan]) -> str | None:
    """Describe the first phase that does not fit and takes more memory with a kept KV cache; None if there is none."""
    kept, freed = copy.deepcopy(config), copy.deepcopy(config)
    kept.trainer.partial_kv, freed.trainer.partial_kv = "keep", "recompute"
    for phase in plan_of(kept).phases:
        if phase.excess and plan_of(freed).phase(phase.phase).total < phase.total:
            return f"with the KV cache {phase.phase} takes {phase.total / GB:.1f} GB of {phase.location}"
    return None


def model_shapes(config: PPOConfig, folders: Mapping[str, str]) -> tuple[dict[str, ModelShape], list[str]]:
    """Return the shapes of the models of a run that are on this machine, by role as in `memory_plan`, and the roles
    whose model is not."""
    policy = config.actor_rollout_ref
    models: dict[str, tuple[str | None, Any, ModelKind]] = {"actor": (policy.model.path, policy.model, "causal_lm")}
    if config.critic.enable:
        models["critic"] = (config.critic.model.path, config.critic.model, "value")
    if "reward_model" in active_roles(config):
        path, model = config.reward_model.path, config.reward_model.model
        generates = serves_reward_model(config) and not _is_classifier(folders.get(path or "", path))
        models["judge" if generates else "reward_model"] = (path, model, "causal_lm" if generates else _CLASSIFIER)
    for name, teacher in config.distillation.local_teachers.items():
        models[f"teacher/{name}"] = (teacher.model_path, replace(policy.model, override_config={}), "causal_lm")
    shapes = {
        role: shape
        for role, (path, model, kind) in models.items()
        if (shape := _shape(folders.get(path or "", path), model, kind))
    }
    return shapes, sorted(set(models) - set(shapes))


def check_megatron_support(config: PPOConfig, folders: Mapping[str, str]) -> None:
    """Raise ConfigError for local models on the megatron engine that it does not support."""
    report = Report()
    megatron_roles = roles_on_megatron(config)
    models: list[tuple[str, str, Any]] = []
    for role in megatron_roles:
        block = MODEL_OF_ROLE[role]
        if role != "teacher":
            key = "reward_model.path" if role == "reward_model" else f"{block}.path"
            models.append((role, key, get_path(config, block)))
    for name in config.distillation.local_teachers if "teacher" in megatron_roles else ():
        model = replace(config.actor_rollout_ref.model, override_config={})
        models.append(("teacher", f"distillation.teacher_models.{name}.model_path", model))
    for role, key, model in models:
        path = get_path(config, key)
        _check_architecture(key, path, folders.get(path or "", path), model, f"{BLOCK_OF_ROLE[role]}.strategy", report)
    report.raise_if_any()


def _check_architecture(
    key: str, path: str | None, folder: str | None, model: Any, strategy: str, report: Report
) -> None:
    """Report a model in a local folder that the megatron engine does not support."""
    if folder is None or not os.path.isdir(expand_path(folder)):
        return
    from verl.models.loading import read_config  # imports torch

    try:
        CoreArchitecture.from_config(
            read_config(resolve_model_path(folder), model.trust_remote_code, model.override_config)
        )
    except ValueError as error:
        why, _, _ = str(error).partition(". ")
        report.problem(key, path, why, f"Set {strategy}=fsdp2, or choose another model")


def check_supervised_memory(config: SupervisedConfig) -> MemoryPlan | None:
    """The same as `check_memory` for a supervised run."""
    shape = supervised_shape(config, config.model.path)
    if shape is None:
        return None
    exclude_supervised_sharing(config, shape)
    device, host = available_memory(config.trainer)
    return _check(config, lambda changed: supervised_memory_plan(changed, shape, device, host))


def supervised_shape(config: SupervisedConfig, folder: str | None) -> ModelShape | None:
    """Return the shape of the model in `folder`, None if it is not on this machine; raise ConfigError if the megatron
    engine does not support it."""
    if config.strategy == "megatron":
        report = Report()
        _check_architecture("model.path", config.model.path, folder, config.model, "strategy", report)
        report.raise_if_any()
    return _shape(folder, config.model, config.model_kind)


def _check(config: Any, plan_of: Callable[[Any], MemoryPlan]) -> MemoryPlan:
    for change in apply_memory_settings(config, plan_of):
        logger.warning("trainer.auto_memory set %s", change.log_text())
    plan = plan_of(config)
    logger.info(plan.render() if config.trainer.console == FULL else plan.summary())
    for block, missing in plan.snapshot_shortfall.items():
        key = f"{block}.checkpoint.snapshot".removeprefix(".")
        if missing:
            logger.warning(
                "%s=False: %.1f GB of host memory are missing for a copy of the checkpoint; training waits while a "
                "checkpoint is written",
                key,
                missing / GB,
            )
        if get_path(config, key) is None:
            set_path(config, key, not missing)
    for warning in check_fits(config, plan_of):
        logger.warning(warning)
    return plan


def _shape(path: str | None, model: Any, kind: ModelKind = "causal_lm") -> ModelShape | None:
    """Return the shape of a local model, or of a known one; None if it is not on this machine (nothing is fetched)."""
    if path is None:
        return None
    if not os.path.isdir(expand_path(path)):
        name, rank = known_name(path), model["lora_rank"] if "lora_rank" in model else 0
        changed = set(model.override_config) - {"num_labels"}  # always 1, as in known shapes
        return None if name is None or changed else known_shape(name, kind, rank)
    return model_shape(resolve_model_path(path), model, kind)


def _is_classifier(path: str | None) -> bool:
    """Whether the model in a local folder is a sequence classifier."""
    kinds = (read_model_config(path or "", {}) or {}).get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in kinds)


def available_memory(trainer: RunConfig) -> tuple[DeviceMemory | None, HostMemory]:
    """Return the memory of each rank's device, None if unknown, and of the host, without the part reserved by Ray."""
    available, installed, ranks = host_memory_available(), host_memory_total(), trainer.n_gpus_per_node
    total, used = int(available * (1 - RESERVED)), max(0, installed - available)
    host = HostMemory(total, is_in_memory(trainer.default_local_dir), installed, used)
    if trainer.device == "cpu":
        return DeviceMemory("cpu", total // max(1, ranks), f"host memory for {ranks} rank(s)"), host
    gpu = gpu_memory()
    return (None if gpu is None else DeviceMemory("cuda", *gpu)), host


def exclude_shared_prefixes(config: PPOConfig, shapes: Mapping[str, ModelShape]) -> None:
    """Set `use_prefix_grouper` from auto to false for roles whose model does not support it on the run's device, and
    log the reason; raise ConfigError if it is true."""
    report = Report()
    for role, path in BLOCK_OF_ROLE.items():
        name = "actor" if role == "ref" else role
        for model, shape in shapes.items():
            if model.partition("/")[0] == name and role in active_roles(config):
                _exclude_sharing(get_path(config, path), f"{path}.{_SHARING}", shape, config.trainer.device, report)
    report.raise_if_any()


def exclude_supervised_sharing(config: SupervisedConfig, shape: ModelShape) -> None:
    """The same as `exclude_shared_prefixes` for a supervised run."""
    report = Report()
    _exclude_sharing(config, _SHARING, shape, config.trainer.device, report)
    report.raise_if_any()


def _exclude_sharing(block: Any, key: str, shape: ModelShape, device: str, report: Report) -> None:
    mode, why = block.use_prefix_grouper, shape.sharing_obstacle
    if why is None or device != "cuda" or block.strategy == "megatron" or mode == "false":
        return
    if mode == "true":
        report.problem(key, True, f"the model's prefixes cannot be shared on a GPU: {why}", "Set it to auto or False")
    else:
        block.use_prefix_grouper = "false"
        logger.info("%s=auto: prefixes are not shared: %s", key, why)
