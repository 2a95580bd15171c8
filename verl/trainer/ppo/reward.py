"""Rewards of a run: the reward manager its configuration asks for, and a batch's scores from it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from verl.config.load import as_config
from verl.config.ppo import PPOConfig
from verl.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from verl.protocol import DataProto
from verl.utils.import_utils import load_user_object
from verl.utils.reward_score import default_compute_score, known_data_sources
from verl.workers.reward_manager import get_reward_manager_cls
from verl.workers.reward_manager.naive import FAILED

Config = PPOConfig | DictConfig | Mapping[str, Any]
_ARGUMENTS = ("solution_str", "ground_truth")
_OPTIONAL_ARGUMENTS = ("data_source", "extra_info")


def load_reward_manager(config: Config, tokenizer: Any, num_examine: int, **reward_kwargs: Any) -> Any:
    """The manager named by `reward_model.reward_manager`, with the user's reward function if one is set.

    It gets `reward_model.reward_kwargs`, then `reward_kwargs`; and `on_error` where it takes that.
    """
    block = as_config(RewardModelConfig, _block(config, "reward_model"))
    cls = get_reward_manager_cls(block.reward_manager)
    accepted = inspect.signature(cls).parameters
    arguments = {**block.reward_kwargs, **reward_kwargs}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if takes_any else sorted(arguments.keys() - accepted.keys())
    if unknown:
        raise ValueError(
            f"reward_model.reward_kwargs: {cls.__name__} does not take {', '.join(unknown)}. "
            f"It takes: {', '.join(list(accepted)[2:])}."
        )
    if "on_error" in accepted:
        arguments.setdefault("on_error", block.on_error)
    data = _block(config, "data")
    if data is not None and "reward_fn_key" in data:
        arguments.setdefault("reward_fn_key", data["reward_fn_key"])
    compute_score = get_custom_reward_fn(config) or default_compute_score
    return cls(tokenizer=tokenizer, num_examine=num_examine, compute_score=compute_score, **arguments)


def get_custom_reward_fn(config: Config) -> Callable[..., Any] | None:
    """The function of `custom_reward_function.{path,name}` with its `reward_kwargs` filled in; None if none is set.

    It is called as `f(data_source=…, solution_str=…, ground_truth=…, extra_info=…)` and may leave out the first and
    the last. It travels to scorer processes by content.
    """
    block = as_config(CustomRewardFunctionConfig, _block(config, "custom_reward_function"))
    if block.path is None:
        return None
    key = "custom_reward_function.path"
    optional = (*_OPTIONAL_ARGUMENTS, *block.reward_kwargs)
    function = load_user_object(block.path, block.name, key=key, required_params=_ARGUMENTS, optional_params=optional)
    accepted = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if takes_any else sorted(block.reward_kwargs.keys() - accepted.keys())
    if unknown:
        raise ValueError(
            f"custom_reward_function.reward_kwargs: {block.name}{inspect.signature(function)} does not take "
            f"{', '.join(unknown)}. Remove it, or add the parameter."
        )
    return functools.partial(function, **block.reward_kwargs) if block.reward_kwargs else function


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Scores [batch, response] of a batch, and what the reward function said beside them (a list per name).

    Where the manager masks samples that could not be scored, their rows of `response_mask` become 0 in `data`: they
    weigh nothing in losses, counts and metrics.
    """
    result = reward_fn(data, return_dict=True)
    extra = dict(result["reward_extra_info"])
    if getattr(reward_fn, "on_error", None) == "mask" and any(extra.get(FAILED, ())):
        kept = 1 - torch.tensor(extra[FAILED], device=data.batch["response_mask"].device)
        data.batch["response_mask"] = data.batch["response_mask"] * kept[:, None].to(data.batch["response_mask"].dtype)
    return result["reward_tensor"], extra


def check_rewards(dataset: Any, config: Config) -> None:
    """Before training: every row can be scored. A ValueError names file, row and remedy.

    A function of the user takes any data source and may need no ground truth; a reward model needs neither.
    """
    if not hasattr(dataset, "validate"):
        return
    own = get_custom_reward_fn(config) is not None
    judged = as_config(RewardModelConfig, _block(config, "reward_model")).enable
    dataset.validate(data_sources=None if own or judged else known_data_sources(), ground_truth=not (own or judged))


def _block(whole: Config, name: str) -> Any:
    """A block of the whole configuration; None where a user's dict leaves it out."""
    return whole.get(name)
