"""What the configuration expects of this machine: files that exist and engines that are installed."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path

from verl.config.plan import BLOCK_OF_ROLE, active_roles
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.schema import pick

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DATA_SUFFIXES = (".parquet", ".json", ".jsonl")
# What a name in the configuration needs importable, and the extra that installs it.
_ENGINE_MODULES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
_LOGGER_MODULES = {name: name for name in ("wandb", "mlflow", "swanlab", "trackio", "tensorboard")}
_EXTRAS = ("vllm", "sglang", "megatron", "wandb", "tensorboard")


def check_environment(config: PPOConfig, report: Report) -> None:
    """Report every path that does not exist here and every package that is asked for and missing."""
    for key in ("train_files", "val_files"):
        for file in config.data[key] or ():
            if not _is_hub_dataset(file):
                _must_exist(f"data.{key}", file, report)
    models: dict[str, str | None] = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.critic.enable:
        models["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable:
        models["reward_model.path"] = config.reward_model.path
        models["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    shown = set()
    for key, path in models.items():
        if path and _looks_local(path) and path not in shown:
            _must_exist(key, path, report)
            shown.add(path)
    _check_code_and_resume(config, report)
    _check_packages(config, report)


def _check_code_and_resume(config: PPOConfig, report: Report) -> None:
    files = {
        "data.custom_cls.path": config.data.custom_cls.path,
        "data.sampler.path": config.data.sampler.path,
        "custom_reward_function.path": config.custom_reward_function.path,
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": (
            config.actor_rollout_ref.rollout.multi_turn.tool_config_path
        ),
    }
    if config.trainer.resume_mode == "resume_path":
        files["trainer.resume_from_path"] = config.trainer.resume_from_path
    for key, path in files.items():
        is_module = path is not None and "/" not in path and not path.endswith((".py", ".yaml", ".yml"))
        if path and not (is_module and key.endswith(("cls.path", "sampler.path", "function.path"))):
            _must_exist(key, path, report)


def _check_packages(config: PPOConfig, report: Report) -> None:
    rollout = config.actor_rollout_ref.rollout.name
    wanted = [("actor_rollout_ref.rollout.name", rollout, _ENGINE_MODULES.get(rollout))]
    wanted += [("trainer.logger", name, _LOGGER_MODULES.get(name)) for name in config.trainer.logger]
    for role in active_roles(config):
        if role in BLOCK_OF_ROLE and pick(config, BLOCK_OF_ROLE[role]).strategy == "megatron":
            wanted.append((f"{BLOCK_OF_ROLE[role]}.strategy", "megatron", "megatron"))
    for key, name, module in wanted:
        if module is not None and importlib.util.find_spec(module) is None:
            how = f"pip install -e .[{name}]" if name in _EXTRAS else f"pip install {module}"
            report.problem(key, name, f"{module} is not installed here", f"Run {how}, or choose another")


def _must_exist(key: str, path: str, report: Report) -> None:
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
    """The highest folder of the path that does not exist: the place to look at."""
    return next(part for part in (*reversed(folder.parents), folder) if not part.exists())


def _is_hub_dataset(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and "/" in name and not name.endswith(_DATA_SUFFIXES)


def _looks_local(path: str) -> bool:
    """A path rather than a hub name (`Qwen/Qwen2.5-0.5B`) or a URL."""
    return "://" not in path and (path.startswith((".", "/", "~", "$")) or not _HUB_NAME.fullmatch(path))
