"""Rewards of a run: the manager its configuration asks for, a batch's scores from it, how many answers are right."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl.algos.trajectories import Trajectories
from verl.config.layout import runs_own_loop
from verl.config.load import as_config
from verl.config.ppo import PPOConfig
from verl.config.reward import CustomRewardFunctionConfig, JudgeConfig, RewardModelConfig
from verl.config.trainer import SandboxConfig, SandboxFusionConfig
from verl.protocol import DataProto
from verl.sandbox.code_runner import CodeSettings
from verl.trainer.ppo.agents import FINISHED, given_scores, place_scores, said_by_agents, statuses
from verl.utils.fs import resolve_model_path
from verl.utils.import_utils import load_user_object
from verl.utils.reward_score import code, default_compute_score, judge, known_data_sources, served
from verl.utils.reward_score.registry import set_arguments
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.naive import ERROR, FAILED

logger = logging.getLogger(__name__)

# A request may wait for many others; unless reward_kwargs.timeout says otherwise.
_SERVER_SECONDS = 600.0
# What the parameters of a function that asks a reward model's server are called.
_OF_A_SERVER = _ADDRESS, _TOKENIZER = "reward_router_address", "reward_model_tokenizer"
Config = PPOConfig | DictConfig | Mapping[str, Any]
Right = dict[str, list[bool]]
"""Whether each answer is right, by data source."""


def load_reward_manager(config: Config, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> Any:
    """The manager named by `reward_model.reward_manager`, with the user's reward function if one is set.

    It gets `reward_model.reward_kwargs`, then `reward_kwargs`; and, where it takes them, `on_error`,
    `skip_special_tokens`, `reward_fn_key`, `max_resp_len` and `overlong_buffer_cfg` from the keys of these names and of
    `data`.
    """
    block = as_config(RewardModelConfig, _block(config, "reward_model"))
    cls = get_reward_manager_cls(block.reward_manager)
    accepted, takes_any = _parameters(cls)
    arguments = {**block.reward_kwargs, **reward_kwargs}
    unknown = [] if takes_any else sorted(arguments.keys() - set(accepted))
    if unknown:
        raise ValueError(
            f"reward_model.reward_kwargs: {cls.__name__} does not take {', '.join(unknown)}. "
            f"It takes: {', '.join(accepted[2:])}."
        )
    offered = {
        "on_error": block.on_error,
        "skip_special_tokens": block.skip_special_tokens,
        "overlong_buffer_cfg": block.overlong_buffer,
    }
    data = _block(config, "data") or {}
    for name, key in (("reward_fn_key", "reward_fn_key"), ("max_resp_len", "max_response_length")):
        if key in data:
            offered[name] = data[key]
    arguments = {name: value for name, value in offered.items() if name in accepted} | arguments
    sandbox = as_config(SandboxConfig, _block(config, "sandbox"))
    fusion = as_config(SandboxFusionConfig, _block(config, "sandbox_fusion"))
    set_arguments(code.compute_score, settings=CodeSettings.of(sandbox, fusion))
    own = get_custom_reward_fn(config)
    compute_score = own or _of_the_url(block) or default_compute_score
    asks = block.url is not None or block.judge.enable or (own is not None and block.enable)
    if asks and "timeout" in accepted:
        arguments.setdefault("timeout", _SERVER_SECONDS)
    return cls(tokenizer=tokenizer, num_examine=num_examine, compute_score=compute_score, **arguments)


def get_custom_reward_fn(config: Config) -> Callable[..., Any] | None:
    """The function of `custom_reward_function.{path,name}` with its `reward_kwargs` filled in; None if none is set.

    It is called as `f(data_source=…, solution_str=…, ground_truth=…, extra_info=…, raw_prompt=…)` and may leave out all
    but the second and third; by the manager `batch` with lists, as `f(data_sources=…, solution_strs=…, …)`. It may be
    async, and is given `reward_router_address` and `reward_model_tokenizer` if it has these parameters. It travels to
    scorer processes by content.
    """
    block = as_config(CustomRewardFunctionConfig, _block(config, "custom_reward_function"))
    if block.path is None:
        return None
    model = as_config(RewardModelConfig, _block(config, "reward_model"))
    required, optional = _called_with(model.reward_manager)
    function = load_user_object(
        block.path,
        block.name,
        key="custom_reward_function.path",
        required_params=required,
        optional_params=(*optional, *_OF_A_SERVER, *block.reward_kwargs),
    )
    accepted = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if takes_any else sorted(block.reward_kwargs.keys() - accepted.keys())
    if unknown:
        raise ValueError(
            f"custom_reward_function.reward_kwargs: {block.name}{inspect.signature(function)} does not take "
            f"{', '.join(unknown)}. Remove it, or add the parameter."
        )
    given = {**_of_a_server(function, model, block.reward_kwargs), **block.reward_kwargs}
    return functools.partial(function, **given) if given else function


def _of_the_url(block: RewardModelConfig) -> Callable[..., Any] | None:
    """Scores of the reward model or judge behind `reward_model.url`; the address of the run's own comes with `bind`."""
    address = {} if block.url is None else {_ADDRESS: block.url}
    if block.judge.enable:
        return functools.partial(judge.compute_score, judge=_judge(block.judge), **address)
    return functools.partial(served.compute_score, **address) if address else None


def _judge(block: JudgeConfig) -> judge.Judge:
    """ValueError: its template cannot be read, or is none."""
    from jinja2 import TemplateSyntaxError

    try:
        text = judge.template_text(block.template)
        judge.compiled(text)
    except OSError as error:
        raise ValueError(
            f"reward_model.judge.template: {error}. Name a file that is there, or give the text."
        ) from error
    except TemplateSyntaxError as error:
        raise ValueError(f"reward_model.judge.template: line {error.lineno} is no Jinja: {error.message}.") from error
    settings = {name: value for name, value in block.to_dict().items() if name != "enable"}
    return judge.Judge(**{**settings, "template": text})


def _of_a_server(function: Callable[..., Any], model: RewardModelConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a function that asks a reward model's server is given: the address, as host:port, and the tokenizer.

    `own`: what it is given anyway.
    """
    asked = inspect.signature(function).parameters
    found: dict[str, Any] = {}
    if model.enable and _ADDRESS not in asked:
        logger.warning(
            "custom_reward_function.path scores the answers and has no parameter %s: nobody asks the reward model of "
            "reward_model.enable=True. Leave one of them out.",
            _ADDRESS,
        )
    if model.url is not None and _ADDRESS in asked:
        found[_ADDRESS] = model.url.removeprefix("http://").rstrip("/")
    if model.path is not None and _TOKENIZER in asked:
        found[_TOKENIZER] = hf_tokenizer(resolve_model_path(model.path, "reward_model.path"))
    for name, key in ((_ADDRESS, "reward_model.url=host:port"), (_TOKENIZER, "reward_model.path")):
        later = name == _ADDRESS and model.enable  # once it is served: NaiveRewardManager.bind
        known = name in found or name in own or later
        if name in asked and not known and asked[name].default is inspect.Parameter.empty:
            raise ValueError(
                f"custom_reward_function.path: its {name} is not known. Set {key} of the reward model, or (main_sft and"
                f" main_eval have none) custom_reward_function.reward_kwargs.{name}."
            )
    return found


class NoRewards:
    """In place of a manager where nothing is scored: 0 for every answer."""

    def __call__(self, data: DataProto, return_dict: bool = True) -> dict[str, Any]:
        return {"reward_tensor": torch.zeros(data.batch["responses"].shape), "reward_extra_info": {}}

    def close(self) -> None:
        """There is nothing to close."""


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """`score_answers`, with turn rewards added to the scores."""
    scores, extra = score_answers(data, reward_fn)
    return with_turn_rewards(scores, data), extra


def with_turn_rewards(scores: torch.Tensor, data: DataProto) -> torch.Tensor:
    """Scores [batch, response] plus the batch's `turn_rewards`, if it has any."""
    return scores + data.batch["turn_rewards"] if "turn_rewards" in data.batch.keys() else scores


def score_answers(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Scores [batch, response] of a batch, and what the reward function or an agent said beside them (a list per name).

    Where the manager masks samples that could not be scored, their rows of `response_mask` become 0 in `data`: they
    weigh nothing in losses, counts and metrics, and group estimators leave them out. A name that the batch has already
    is `reward_<name>` here. Of a trajectory with several rows the one with its last model token is scored, and has the
    score; what is said beside it is on all of them. One that brings its score, or did not go through to its end, is not
    scored again. Turn rewards are not part of these scores.
    """
    whole = Trajectories.of(data)
    given, asked = given_scores(data, whole)
    scores = torch.zeros(data.batch["responses"].shape)
    said: dict[str, list[Any]] = {}
    if len(asked) == len(data):
        result = reward_fn(data, return_dict=True)
        scores, said = result["reward_tensor"], dict(result["reward_extra_info"])
    elif len(asked):
        rows = whole.last_rows[asked]
        result = reward_fn(data.select_idxs(rows), return_dict=True)
        scores = scores.to(result["reward_tensor"])
        scores[torch.from_numpy(rows)] = result["reward_tensor"]
        said = {name: _at(asked, values, len(whole)) for name, values in result["reward_extra_info"].items()}
        said |= {name: [value or 0.0 for value in values] for name, values in said.items() if name == FAILED}
    if given:
        scores = scores + place_scores(given, data, whole)
    for name, values in said_by_agents(data, whole).items():
        there = said.get(name, [None] * len(whole))
        said[name] = [old if new is None else new for new, old in zip(values, there, strict=True)]
    taken = {*data.batch.keys(), *data.non_tensor_batch}
    extra = {
        f"reward_{name}" if name in taken else name: [values[number] for number in whole.of_row]
        for name, values in said.items()
    }
    if getattr(reward_fn, "on_error", None) == "mask" and any(extra.get(FAILED, ())):
        kept = 1 - torch.tensor(extra[FAILED], device=data.batch["response_mask"].device)
        data.batch["response_mask"] = data.batch["response_mask"] * kept[:, None].to(data.batch["response_mask"].dtype)
    return scores, extra


def _at(places: Iterable[int], values: Iterable[Any], count: int) -> list[Any]:
    """`count` entries: the values at these places, None elsewhere."""
    entries: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        entries[place] = value
    return entries


def reward_metrics(extra: Mapping[str, Iterable[Any]]) -> dict[str, float]:
    """For the log: `reward/<name>/mean` of what is a number in each column, `reward/errors` and those by kind."""
    metrics = {}
    for name, values in extra.items():
        numbers = [float(value) for value in values if isinstance(value, int | float | np.number)]
        numbers = [number for number in numbers if math.isfinite(number)]
        if numbers:
            metrics[f"reward/{name}/mean"] = sum(numbers) / len(numbers)
    if ERROR in extra:
        kinds = Counter(kind for kind in extra[ERROR] if kind is not None)
        metrics["reward/errors"] = float(kinds.total())
        metrics |= {f"reward/errors/{kind}": float(count) for kind, count in kinds.items()}
    return metrics


def answer_scores(scores: torch.Tensor, whole: Trajectories, failed: Iterable[Any] | None) -> list[float | None]:
    """The score of each trajectory, from the rows' `scores` [batch].

    `failed`: the column `scoring_failed`, if the batch has it. A trajectory that could not be scored is None if it is
    masked; otherwise (`reward_model.on_error`) it has a score of 0.
    """
    values: list[float | None] = whole.sum(scores).tolist()
    if failed is None:
        return values
    kept = whole.mask.bool().any(-1).tolist()
    flags = list(failed)
    unscored = [bool(flags[row]) for row in whole.last_rows]
    triples = zip(values, unscored, kept, strict=True)
    return [None if is_unscored and not is_kept else value for value, is_unscored, is_kept in triples]


def unfinished_agents(batch: DataProto, whole: Trajectories) -> list[bool]:
    """Per trajectory, whether its agent failed or was aborted."""
    return [status != FINISHED for status in statuses(batch, whole)]


def is_number(value: Any) -> bool:
    """Whether a value that a reward function returned is a number. `acc` is only used if it is one."""
    return isinstance(value, bool | int | float | np.number | np.bool_)


def right_answers(
    sources: Sequence[str],
    scores: Sequence[float | None],
    accuracies: Sequence[Any] | None,
    judged: bool,
    unfinished: Sequence[bool] | None = None,
) -> Right:
    """Whether each answer is right, by data source: by `acc` (`accuracies`) if it is a number, else by a score of 1.

    `scores` are the reward function's (`answer_scores`). Those of a reward model (`judged`) are degrees, not verdicts:
    without `acc` such an answer does not count. Nor does one that could not be scored (None). The answer of an
    `unfinished` agent counts as wrong; with `judged`, only if other answers of its source count.
    """
    right: Right = defaultdict(list)
    failed: Counter[str] = Counter()
    samples = zip(sources, scores, accuracies or [None] * len(scores), unfinished or [False] * len(scores), strict=True)
    for source, score, acc, is_unfinished in samples:
        if is_unfinished:
            failed[source] += 1
        elif is_number(acc):
            right[source].append(bool(acc >= 1.0))
        elif not judged and score is not None:
            right[source].append(score >= 1.0)
    for source, count in failed.items():
        if source in right or not judged:
            right[source] += [False] * count
    return {source: right[source] for source in dict.fromkeys(sources) if source in right}


def say_right(right: Right, when: str = "") -> None:
    """One line per source, as users know it."""
    for source, answers in right.items():
        total, correct = len(answers), sum(answers)
        logger.info("%s%s Correct: %d/%d, Accuracy: %.2f", when, source, correct, total, correct / total)


def say_right_of_step(batch: DataProto, extra: Mapping[str, Any], source_key: str, judged: bool, step: int) -> None:
    """The same for a scored training batch with `answer_scores`; `extra` names the columns that the reward added."""
    columns, whole = batch.non_tensor_batch, Trajectories.of(batch)
    answers = whole.last_rows
    sources = columns[source_key][answers].tolist() if source_key in columns else ["unknown"] * len(whole)
    accuracies = columns["acc"][answers].tolist() if "acc" in extra else None
    scores = answer_scores(batch.batch["answer_scores"], whole, columns.get(FAILED))
    right = right_answers(sources, scores, accuracies, judged, unfinished_agents(batch, whole))
    say_right(right, when=f"step {step}: ")


def check_rewards(dataset: Any, config: Config, scored: bool = True) -> None:
    """Before training: every row can be scored. A ValueError names file, row and remedy.

    A function of the user takes any data source and may need no ground truth; a reward model needs neither, nor do rows
    that are not `scored`, or that an agent loop of the user runs: it may return the score.
    """
    if not hasattr(dataset, "validate"):
        return
    own = not scored or get_custom_reward_fn(config) is not None
    model = as_config(RewardModelConfig, _block(config, "reward_model"))
    by_agent = isinstance(config, PPOConfig) and runs_own_loop(config)
    needed = not (own or model.enable or model.url is not None or by_agent)
    dataset.validate(data_sources=known_data_sources() if needed else None, ground_truth=needed)


def _block(whole: Config, name: str) -> Any:
    """A block of the whole configuration; None where a user's dict leaves it out."""
    return whole.get(name)


def _called_with(manager: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters that a manager's reward function must have, and may have; a user's manager says them like ours."""
    cls, ours = get_reward_manager_cls(manager), NaiveRewardManager
    return (
        getattr(cls, "required_arguments", ours.required_arguments),
        getattr(cls, "optional_arguments", ours.optional_arguments),
    )


def _parameters(cls: type) -> tuple[list[str], bool]:
    """What a class takes, with what it hands on to those it inherits from; and whether it takes anything at all."""
    names: dict[str, None] = {}
    for owner in (owner for owner in cls.__mro__ if "__init__" in vars(owner)):
        parameters = list(inspect.signature(owner).parameters.values())
        names |= dict.fromkeys(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            return list(names), False
    return list(names), True
