"""Checks of this machine: files that must exist, packages that must be installed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from verl.config import names
from verl.config.block_rules import check_lora_package, is_installed
from verl.config.context_length import context_rules
from verl.config.layout import BLOCK_OF_ROLE
from verl.config.megatron import model_layout_rules, roles_on_megatron
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, install_command
from verl.config.schema import Block, get_path
from verl.config.trainer import RunConfig

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DATA_SUFFIXES = (".parquet", ".json", ".jsonl")
# Trackers that an extra of this package installs.
_EXTRAS = ("wandb", "tensorboard")


def check_environment(config: PPOConfig, report: Report) -> None:
    """Report missing files and packages, and models with a too short context."""
    check_data_files(config.data, report)
    models: dict[str, str | None] = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.critic.enable:
        models["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable:
        models["reward_model.path"] = config.reward_model.path
        models["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    for name, teacher in config.distillation.local_teachers.items():
        models[f"distillation.teacher_models.{name}.model_path"] = teacher.model_path
    checked = set()
    for key, path in models.items():
        if path and path not in checked:
            check_model(key, path, report)
            checked.add(path)
    context_rules(config, report)
    model_layout_rules(config, report)
    _check_code_and_resume(config, report)
    check_loggers(config.trainer.logger, report)
    check_lora_package("actor_rollout_ref.model", config.actor_rollout_ref.model, report)
    if config.critic.enable:
        check_lora_package("critic.model", config.critic.model, report)


def check_data_files(data: Block, report: Report) -> None:
    """Report missing training and validation files; hub names are not checked."""
    for key in ("train_files", "val_files"):
        check_paths(f"data.{key}", data[key], report)


def check_paths(key: str, paths: Sequence[str] | None, report: Report) -> None:
    """Report missing data files; hub names are not checked."""
    for path in paths or ():
        if not _is_hub_dataset(path):
            must_exist(key, path, report)


def check_model(key: str, path: str, report: Report) -> None:
    """Report a missing model folder; hub names and URLs are not checked."""
    if _looks_local(path):
        must_exist(key, path, report)


def check_user_code(key: str, path: str | None, report: Report) -> None:
    """Report a missing Python file; module names are not checked."""
    if path and ("/" in path or path.endswith(".py")):
        must_exist(key, path, report)


def check_loggers(loggers: Sequence[str], report: Report) -> None:
    """Report trackers whose package is not installed."""
    for name in loggers:
        package = names.tracker_package(name)
        if package is not None and not is_installed(package):
            how = install_command(f"pip install -e .[{name}]") if name in _EXTRAS else f"pip install {package}"
            report.problem(
                "trainer.logger", name, f"{package} is not installed", f"Run {how}, or choose another tracker"
            )


def _check_code_and_resume(config: PPOConfig, report: Report) -> None:
    check_user_code("data.custom_cls.path", config.data.custom_cls.path, report)
    check_user_code("data.sampler.path", config.data.sampler.path, report)
    check_user_code("custom_reward_function.path", config.custom_reward_function.path, report)
    turns = config.actor_rollout_ref.rollout.multi_turn
    for name in ("tool_config_path", "function_tool_path", "interaction_config_path"):
        if turns[name]:
            must_exist(f"actor_rollout_ref.rollout.multi_turn.{name}", turns[name], report)
    agent = config.actor_rollout_ref.rollout.agent
    if agent.agent_loop_config_path:
        must_exist("actor_rollout_ref.rollout.agent.agent_loop_config_path", agent.agent_loop_config_path, report)
    for role in roles_on_megatron(config):
        key = f"{BLOCK_OF_ROLE[role]}.megatron_config.dist_checkpointing_path"
        if get_path(config, key):
            must_exist(key, get_path(config, key), report)
    check_resume(config.trainer, report)


def check_resume(trainer: RunConfig, report: Report) -> None:
    """Report a missing checkpoint of trainer.resume_from_path."""
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        must_exist("trainer.resume_from_path", trainer.resume_from_path, report)


def must_exist(key: str, path: str, report: Report) -> None:
    """Report a local path that does not exist, with the most similar name."""
    if "://" in path or Path(path).exists():
        return
    unset = re.findall(r"\$\{?(\w+)", path)
    parent = Path(path).absolute().parent
    if unset:
        why, fix = f"the environment variable {unset[0]} is not set", f"Run export {unset[0]}=… first"
    elif not parent.is_dir():
        why, fix = f"no such file or folder ({_first_missing(parent)} does not exist)", "Correct the path"
    else:
        near = difflib.get_close_matches(Path(path).name, [item.name for item in parent.iterdir()], n=1)
        why = "no such file or folder"
        fix = f"Did you mean {parent / near[0]}?" if near else "Correct the path"
    report.problem(key, path, why, fix)


def _first_missing(folder: Path) -> Path:
    """Return the topmost folder of the path that does not exist."""
    return next(part for part in (*reversed(folder.parents), folder) if not part.exists())


def _is_hub_dataset(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and "/" in name and not name.endswith(_DATA_SUFFIXES)


def _looks_local(path: str) -> bool:
    """Whether this is a path, not a hub name (`Qwen/Qwen2.5-0.5B`) or a URL."""
    return "://" not in path and (path.startswith((".", "/", "~", "$")) or not _HUB_NAME.fullmatch(path))
