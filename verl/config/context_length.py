"""Context length of models, and rules for sequences that exceed it."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.layout import ROLLOUT
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

_POSITIONS = ("max_position_embeddings", "n_positions")
# RoPE scaling types whose factor multiplies the length in the config; with llama3 and longrope it is already extended.
_EXTENDING = ("linear", "dynamic", "yarn")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_LENGTHS = ("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.max_new_tokens")
LONGER_CONTEXT = "choose a model with a longer context (or raise max_position_embeddings in override_config)"


def context_limit(config: Mapping[str, Any]) -> int | None:
    """Return the context length of a config.json (including rope scaling); None if unknown."""
    text = config.get("text_config") or config
    positions = next((text[name] for name in _POSITIONS if isinstance(text.get(name), int)), None)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if positions is None or not isinstance(rope, Mapping) or "rope_local_base_freq" in text:
        return positions
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind not in _EXTENDING or not isinstance(factor, int | float):
        return positions
    return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))


def read_model_config(folder: str, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of a local folder with `changes`; None if it does not exist or is damaged."""
    config = _read_json(folder, "config.json")
    return None if config is None else {**config, **changes}


def _read_json(folder: str, name: str) -> dict[str, Any] | None:
    """Return the contents of a JSON file in a local folder; None if it does not exist or is damaged."""
    file = Path(folder).expanduser() / name
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:  # reported when the model is loaded
        return None
    return content if isinstance(content, dict) else None


def context_limit_of_folder(folder: str, changes: Mapping[str, Any]) -> int | None:
    """Return the context length of the model in a local folder, with `changes` to its config; None if unknown."""
    config = read_model_config(folder, changes)
    return None if config is None else context_limit(config)


def context_rules(config: PPOConfig, report: Report, folders: Mapping[str, str] | None = None) -> None:
    """Report sequences longer than the context of a model; `folders`: local folders of hub names and URLs."""
    policy, critic, local = config.actor_rollout_ref, config.critic, folders or {}
    path = policy.model.path or ""
    limit = None if not path else context_limit_of_folder(local.get(path, path), policy.model.override_config)
    if limit is not None:
        _check_policy(config, limit, report)
    other = critic.model.path
    if critic.enable and other and (other, critic.model.override_config) != (path, policy.model.override_config):
        limit = context_limit_of_folder(local.get(other, other), critic.model.override_config)
        _check_reader(config, limit, "critic.model.path", other, report)
    for name, teacher in config.distillation.local_teachers.items():
        if teacher.model_path:
            limit = context_limit_of_folder(local.get(teacher.model_path, teacher.model_path), {})
            _check_reader(config, limit, f"distillation.teacher_models.{name}.model_path", teacher.model_path, report)
    if config.reward_model.enable and config.reward_model.path:
        _check_reward_model(
            config, local.get(config.reward_model.path, config.reward_model.path), local.get(path, path), report
        )


def check_context_length(config: PPOConfig, folders: Mapping[str, str]) -> None:
    """Raise ConfigError if sequences may exceed the context of the downloaded models in `folders`."""
    report = Report()
    context_rules(config, report, folders)
    report.raise_if_any()


def _longest(config: PPOConfig) -> int:
    """Return the largest length of prompt and response."""
    rollout = config.actor_rollout_ref.rollout
    return config.data.max_prompt_length + max(rollout.max_new_tokens, rollout.val_kwargs.max_new_tokens)


def _check_policy(config: PPOConfig, limit: int, report: Report) -> None:
    rollout, prompt, needed = config.actor_rollout_ref.rollout, config.data.max_prompt_length, _longest(config)
    model = f"the {limit} positions of actor_rollout_ref.model.path = {config.actor_rollout_ref.model.path}"
    if prompt >= limit:
        why = f"leaves no room for a response in {model}"
        fix = f"Set it below {limit}, or {LONGER_CONTEXT}"
        report.problem("data.max_prompt_length", prompt, why, fix, ("actor_rollout_ref.model.path",))
    elif needed > limit:
        key = _response_key(config)
        why = f"with data.max_prompt_length = {prompt} a sequence has up to {needed} tokens, more than {model}"
        fix = f"Set it to {limit - prompt} or less, shorten data.max_prompt_length, or {LONGER_CONTEXT}"
        report.problem(key, needed - prompt, why, fix, (*_LENGTHS, "actor_rollout_ref.model.path"))
    elif rollout.max_model_len > limit:
        fix = f"Set it to {limit} or less, or leave it out"
        report.problem(f"{ROLLOUT}.max_model_len", rollout.max_model_len, f"is more than {model}", fix)


def _check_reader(config: PPOConfig, limit: int | None, key: str, path: str | None, report: Report) -> None:
    """Report a model whose context is shorter than the policy's prompt and response."""
    if limit is not None and limit < _longest(config):
        why = f"has {limit} positions, but prompt and response may have {_longest(config)} tokens"
        fix = f"Shorten data.max_prompt_length or data.max_response_length, or {LONGER_CONTEXT}"
        report.problem(key, path, why, fix, _LENGTHS)


def _response_key(config: PPOConfig) -> str:
    """Return the key that determines the largest response length."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_new_tokens < rollout.val_kwargs.max_new_tokens:
        return f"{ROLLOUT}.val_kwargs.max_new_tokens"
    if rollout.max_new_tokens == config.data.max_response_length:
        return "data.max_response_length"
    return f"{ROLLOUT}.max_new_tokens"


def _check_reward_model(config: PPOConfig, path: str, policy: str, report: Report) -> None:
    """Report a reward model with a too short context; `path` and `policy` are the folders of both models.

    With the policy's tokenizer it reads the whole sequence; with its own, texts are truncated to `max_length`.
    """
    reward = config.reward_model
    limit = context_limit_of_folder(path, reward.model.override_config)
    if limit is None:
        return
    if _same_tokenizer(path, reward.model.input_tokenizer or policy):
        _check_reader(config, limit, "reward_model.path", reward.path, report)
        return
    max_length = reward.max_length or _model_max_length(path)
    if max_length is None or max_length > limit:
        tokenizer = "" if reward.max_length else f" (model_max_length of its tokenizer: {max_length or 'none'})"
        why = f"the reward model at {path} has {limit} positions{tokenizer}"
        fix = f"Set it to {limit} or less: longer texts are truncated at the beginning"
        if reward.max_length or _longest(config) > limit:
            report.problem("reward_model.max_length", reward.max_length, why, fix, ("reward_model.path",))


def _same_tokenizer(one: str, other: str) -> bool:
    """Whether two local folders contain the same tokenizer."""
    folders = [Path(folder).expanduser() for folder in (one, other)]
    present = [[name for name in _TOKENIZER_FILES if (folder / name).is_file()] for folder in folders]
    if not present[0] or present[0] != present[1]:
        return False
    return all(filecmp.cmp(folders[0] / name, folders[1] / name, shallow=False) for name in present[0])


def _model_max_length(path: str) -> int | None:
    length = (_read_json(path, "tokenizer_config.json") or {}).get("model_max_length")
    # Tokenizers without a limit have 1e30.
    return int(length) if isinstance(length, int | float) and length < 1e9 else None
