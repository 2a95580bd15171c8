"""What a model excludes, before it is loaded: parallel sizes that do not divide its heads, and shared prefixes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl.config.layout import BLOCK_OF_ROLE, active_roles, serves_reward_model
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.schema import get_path
from verl.config.supervised import SupervisedConfig
from verl.planning.shapes import ModelShape

logger = logging.getLogger(__name__)

_SHARING = "use_prefix_grouper"
_ULYSSES = "ulysses_sequence_parallel_size"
_TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"


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
    """The same for a supervised run."""
    report = Report()
    if config.strategy != "megatron":
        _check_heads(_ULYSSES, config.ulysses_sequence_parallel_size, shape, report)
    report.raise_if_any()


def exclude_shared_prefixes(config: PPOConfig, shapes: Mapping[str, ModelShape]) -> None:
    """Set `use_prefix_grouper` from auto to false for roles whose model does not support it on the run's device, and
    log the reason; raise ConfigError if it is true."""
    report = Report()
    for role, path in BLOCK_OF_ROLE.items():
        name = "actor" if role == "ref" else role
        for model, shape in shapes.items():
            if model.partition("/")[0] == name and role in active_roles(config):
                _exclude(get_path(config, path), f"{path}.{_SHARING}", shape, config.trainer.device, report)
    report.raise_if_any()


def exclude_supervised_sharing(config: SupervisedConfig, shape: ModelShape) -> None:
    """The same for a supervised run."""
    report = Report()
    _exclude(config, _SHARING, shape, config.trainer.device, report)
    report.raise_if_any()


def _exclude(block: Any, key: str, shape: ModelShape, device: str, report: Report) -> None:
    mode, why = block.use_prefix_grouper, shape.sharing_obstacle
    if why is None or device != "cuda" or block.strategy == "megatron" or mode == "false":
        return
    if mode == "true":
        report.problem(key, True, f"the model's prefixes cannot be shared on a GPU: {why}", "Set it to auto or False")
    else:
        block.use_prefix_grouper = "false"
        logger.info("%s=auto: prefixes are not shared: %s", key, why)


def _check_rollout(config: PPOConfig, shape: ModelShape | None, report: Report) -> None:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    if shape is None or rollout.server_urls:
        return
    _check_heads(_TENSOR_PARALLEL, size, shape, report)
    key_heads_fit = max(size, shape.kv_heads) % min(size, shape.kv_heads) == 0
    if rollout.name == "native" and not key_heads_fit and not report.problems:
        why = f"the model has {shape.kv_heads} key heads; one of both must divide the other"
        report.problem(_TENSOR_PARALLEL, size, why, f"Use one of {_divisors(shape.kv_heads)}")


def _check_heads(key: str, size: int, shape: ModelShape, report: Report) -> None:
    if shape.heads % size:
        why = f"does not divide the {shape.heads} attention heads of the model"
        report.problem(key, size, why, f"Use one of {_divisors(shape.heads)}")


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
