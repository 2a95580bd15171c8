"""Create reward managers from the configuration; serve the run's reward model to reward functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl.config.layout import uses_custom_agent_loop
from verl.config.load import as_config
from verl.config.ppo import PPOConfig
from verl.config.roles import CustomRewardFunctionConfig, JudgeConfig, RewardModelConfig
from verl.config.trainer import SandboxConfig, SandboxFusionConfig
from verl.sandbox.code_runner import CodeSettings
from verl.trainer.ppo.scoring import compute_reward
from verl.utils.fs import resolve_model_path
from verl.utils.import_utils import load_user_object
from verl.utils.reward_score import code, default_compute_score, judge, known_data_sources, served
from verl.utils.reward_score.registry import set_arguments
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls

if TYPE_CHECKING:
    from verl.trainer.ppo.worker_groups import WorkerGroups

__all__ = ["RewardModelServer", "check_rewards", "compute_reward", "get_custom_reward_fn", "load_reward_manager"]

logger = logging.getLogger(__name__)

# Default timeout of a reward function that calls a server, where many requests are queued.
_SERVER_TIMEOUT_S = 600.0
# Parameters of reward functions that call the server of a reward model.
_SERVER_PARAMETERS = _ADDRESS, _TOKENIZER = "reward_router_address", "reward_model_tokenizer"
_MAX_CONNECTIONS = 8192
Config = PPOConfig | DictConfig | Mapping[str, Any]


def load_reward_manager(config: Config, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> Any:
    """Return the manager named by `reward_model.reward_manager`, with the user's reward function if one is set.

    Its arguments are `reward_model.reward_kwargs`, overridden by `reward_kwargs`. The parameters `on_error`,
    `skip_special_tokens`, `reward_fn_key`, `max_resp_len` and `overlong_buffer_cfg` of its constructor, if it has them,
    are set from the configuration.
    """
    block = as_config(RewardModelConfig, _section(config, "reward_model"))
    cls = get_reward_manager_cls(block.reward_manager)
    accepted, accepts_any = _constructor_parameters(cls)
    arguments = {**block.reward_kwargs, **reward_kwargs}
    unknown = [] if accepts_any else sorted(arguments.keys() - set(accepted))
    if unknown:
        settable = [name for name in accepted if name not in ("tokenizer", "num_examine")]
        raise ValueError(
            f"reward_model.reward_kwargs: {cls.__name__} does not take {', '.join(unknown)}. "
            f"It takes: {', '.join(settable)}."
        )
    defaults = {
        "on_error": block.on_error,
        "skip_special_tokens": block.skip_special_tokens,
        "overlong_buffer_cfg": block.overlong_buffer,
    }
    data = _section(config, "data") or {}
    for name, key in (("reward_fn_key", "reward_fn_key"), ("max_resp_len", "max_response_length")):
        if key in data:
            defaults[name] = data[key]
    arguments = {name: value for name, value in defaults.items() if name in accepted} | arguments
    sandbox = as_config(SandboxConfig, _section(config, "sandbox"))
    fusion = as_config(SandboxFusionConfig, _section(config, "sandbox_fusion"))
    set_arguments(code.compute_score, settings=CodeSettings.from_config(sandbox, fusion))
    custom = get_custom_reward_fn(config)
    compute_score = custom or _server_reward_fn(block) or default_compute_score
    calls_server = block.url is not None or block.judge.enable or (custom is not None and block.enable)
    if calls_server and "timeout" in accepted:
        arguments.setdefault("timeout", _SERVER_TIMEOUT_S)
    return cls(tokenizer=tokenizer, num_examine=num_examine, compute_score=compute_score, **arguments)


def get_custom_reward_fn(config: Config) -> Callable[..., Any] | None:
    """Return the function of `custom_reward_function.{path,name}` with its `reward_kwargs` bound; None if none is set.

    It is called as `f(data_source=…, solution_str=…, ground_truth=…, extra_info=…, raw_prompt=…)`; only the parameters
    `solution_str` and `ground_truth` are required. The manager `batch` passes lists: `f(data_sources=…,
    solution_strs=…, …)`. The function may be async, and may also have the parameters `reward_router_address` and
    `reward_model_tokenizer`. Scorer processes receive its source, not its path.
    """
    block = as_config(CustomRewardFunctionConfig, _section(config, "custom_reward_function"))
    if block.path is None:
        return None
    model = as_config(RewardModelConfig, _section(config, "reward_model"))
    # A manager class declares the parameters of its reward functions in these attributes.
    manager = get_reward_manager_cls(model.reward_manager)
    required = getattr(manager, "required_arguments", NaiveRewardManager.required_arguments)
    optional = getattr(manager, "optional_arguments", NaiveRewardManager.optional_arguments)
    function = load_user_object(
        block.path,
        block.name,
        key="custom_reward_function.path",
        required_params=required,
        optional_params=(*optional, *_SERVER_PARAMETERS, *block.reward_kwargs),
    )
    accepted = inspect.signature(function).parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if accepts_any else sorted(block.reward_kwargs.keys() - accepted.keys())
    if unknown:
        raise ValueError(
            f"custom_reward_function.reward_kwargs: {block.name}{inspect.signature(function)} does not take "
            f"{', '.join(unknown)}. Remove it, or add the parameter."
        )
    arguments = {**_server_arguments(function, model, block.reward_kwargs), **block.reward_kwargs}
    return functools.partial(function, **arguments) if arguments else function


def _server_reward_fn(block: RewardModelConfig) -> Callable[..., Any] | None:
    """Return the reward function that calls the reward model or judge at `reward_model.url`. The address of a server
    that this run starts is bound later (`RewardModelServer.start`)."""
    address = {} if block.url is None else {_ADDRESS: block.url}
    if block.judge.enable:
        return functools.partial(judge.compute_score, judge=_create_judge(block.judge), **address)
    return functools.partial(served.compute_score, **address) if address else None


def _create_judge(block: JudgeConfig) -> judge.Judge:
    """Return the judge. Raises ValueError if its template cannot be read or is invalid."""
    from jinja2 import TemplateSyntaxError

    try:
        text = judge.template_text(block.template)
        judge.compiled(text)
    except OSError as error:
        raise ValueError(
            f"reward_model.judge.template: {error}. Set it to an existing file, or to the text of the template."
        ) from error
    except TemplateSyntaxError as error:
        raise ValueError(
            f"reward_model.judge.template: invalid Jinja in line {error.lineno}: {error.message}."
        ) from error
    settings = {name: value for name, value in block.to_dict().items() if name != "enable"}
    return judge.Judge(**{**settings, "template": text})


def _server_arguments(
    function: Callable[..., Any], model: RewardModelConfig, reward_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the function's arguments `reward_router_address` (host:port) and `reward_model_tokenizer`, if it has these
    parameters. Raises ValueError for a required one that is neither known nor in `reward_kwargs`."""
    parameters = inspect.signature(function).parameters
    arguments: dict[str, Any] = {}
    if model.enable and _ADDRESS not in parameters:
        logger.warning(
            "reward_model.enable=True, but custom_reward_function.path scores the responses and has no parameter %s:"
            " the reward model is not used. Remove one of the two keys.",
            _ADDRESS,
        )
    if model.url is not None and _ADDRESS in parameters:
        arguments[_ADDRESS] = model.url.removeprefix("http://").rstrip("/")
    if model.path is not None and _TOKENIZER in parameters:
        arguments[_TOKENIZER] = hf_tokenizer(resolve_model_path(model.path, "reward_model.path"))
    for name, key in ((_ADDRESS, "reward_model.url=host:port"), (_TOKENIZER, "reward_model.path")):
        bound_later = name == _ADDRESS and model.enable  # by `RewardModelServer.start`
        known = name in arguments or name in reward_kwargs or bound_later
        if name in parameters and not known and parameters[name].default is inspect.Parameter.empty:
            raise ValueError(
                f"custom_reward_function.path: no value for its parameter {name}. Set {key}, or, without a"
                f" reward model (as in main_sft and main_eval), custom_reward_function.reward_kwargs.{name}."
            )
    return arguments


def _section(root: Config, name: str) -> Any:
    """Return a section of the configuration; None if a user's dict lacks it."""
    return root.get(name)


def _constructor_parameters(cls: type) -> tuple[list[str], bool]:
    """Return the names of the constructor's parameters, including those of base classes that receive `**kwargs`, and
    whether it accepts any name."""
    names: dict[str, None] = {}
    for owner in (owner for owner in cls.__mro__ if "__init__" in vars(owner)):
        parameters = list(inspect.signature(owner).parameters.values())
        names |= dict.fromkeys(
            parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
        )
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return list(names), False
    return list(names), True


def check_rewards(dataset: Any, config: Config, scored: bool = True) -> None:
    """Raise ValueError with file, row and remedy if a row of the dataset cannot be scored.

    Rows need a known data source and a ground truth, unless they are scored by a user's function, a reward model or a
    user's agent loop, or are not scored (`scored=False`).
    """
    if not hasattr(dataset, "validate"):
        return
    custom = not scored or get_custom_reward_fn(config) is not None
    model = as_config(RewardModelConfig, _section(config, "reward_model"))
    by_agent = isinstance(config, PPOConfig) and uses_custom_agent_loop(config)
    needed = not (custom or model.enable or model.url is not None or by_agent)
    dataset.validate(data_sources=known_data_sources() if needed else None, ground_truth=needed)


class RewardModelServer:
    """Serves the run's reward model at one HTTP address, which reward functions call.

    `offloads`: the reward model shares its devices with other models, and is loaded only while a batch is scored.
    """

    def __init__(self, groups: WorkerGroups, offloads: bool) -> None:
        from verl.inference.serving.router import Router  # imports a web server

        self._groups, self._offloads = groups, offloads
        self._router = Router()
        self._resources = contextlib.ExitStack()

    def start(self, *managers: Any) -> list[Any]:
        """Start the router and bind its address to the reward managers; return managers that replace them, in order."""
        from verl.utils.http_server.server import ConnectionLimits, serve_in_thread

        serving = serve_in_thread(
            self._router.app(), "the reward model", limits=ConnectionLimits(connections=_MAX_CONNECTIONS)
        )
        address = f"127.0.0.1:{self._resources.enter_context(serving)}"
        self._update_addresses()
        if self._offloads:
            self._groups.reward_model.offload()
        bound: dict[int, Any] = {}
        for manager in managers:
            if manager is not None and id(manager) not in bound:
                manager.bind(reward_router_address=address)
                bound[id(manager)] = _ServedRewardManager(manager, self)
        return [bound.get(id(manager)) for manager in managers]

    @contextlib.contextmanager
    def on_devices(self) -> Iterator[None]:
        """Context of scoring a batch: the reward model is on its devices."""
        self._update_addresses()
        if self._offloads:
            self._groups.reward_model.onload()
        try:
            yield
        finally:
            if self._offloads:
                self._groups.reward_model.offload()

    def close(self) -> None:
        self._resources.close()

    def _update_addresses(self) -> None:
        """Read the addresses of the ranks' servers, which change when the group is restarted."""
        self._router.servers = dict(self._groups.reward_model.address())


class _ServedRewardManager:
    """A reward manager that scores batches while the reward model is on its devices."""

    def __init__(self, manager: Any, server: RewardModelServer) -> None:
        self._manager, self._server = manager, server

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._server.on_devices():
            return self._manager(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def close(self) -> None:
        self._manager.close()
        self._server.close()
