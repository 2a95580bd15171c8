"""AgentLoopBase: base class of agent loops. A loop calls the model and its environment, and returns the tokens of the
trajectory with a mask of those that the model sampled.

Loops are chosen by name: included ones, those registered with `@register` or listed in a YAML file, or, for the
configured default only, an import path. Rows may also name a class of a module that is already imported.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.config import AgentConfig, PPOConfig, RolloutConfig, names
from verl.types.request import TokenOutput
from verl.utils.exceptions import PicklableError
from verl.utils.import_utils import ImportPath
from verl.utils.registry import Registry
from verl.utils.tokenizer import max_characters
from verl.workers.rollout.call_trace import current_trace

__all__ = [
    "AGENT_LOOPS",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "LoopSpec",
    "TokenOutput",
    "TrajectoryFailed",
    "find_loop",
    "imported_class",
    "listed_loops",
    "read_loop_file",
    "register",
    "register_agent_loop",
]

Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class AgentLoopMetrics:
    """Times (in seconds) and counts of a trajectory."""

    generate_sequences: float = 0.0
    """Seconds of generation; 0: measured by the EngineClient."""
    tool_calls: float = 0.0
    """Seconds in tools."""
    compute_score: float = 0.0
    num_preempted: int = 0
    tool_call_counts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failures by kind: malformed, unknown, arguments, exception, timeout, limit …"""
    tools: dict[str, dict[str, float]] = field(default_factory=dict)
    """By tool: `calls`, `errors`, `seconds`."""


@dataclass(slots=True)
class AgentLoopOutput:
    """One context of a trajectory: a prompt, and the tokens that the model and its environment appended."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 on tokens that the model sampled; 0 on tool output and other environment tokens, which the loss ignores.
    Becomes the column `response_mask` in `rows_from_trajectories`."""
    response_logprobs: list[float] | None = None
    """One per response token; None: those that the engine reported."""
    reward_score: float | None = None
    """Score of the trajectory; if several outputs have one, that of the last counts. If set, reward functions are not
    called."""
    num_turns: int = 0
    """Turns that this output adds to its trajectory. If 0 in all outputs, they are counted: prompts, responses and
    replies of the environment."""
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Columns of the trajectory's rows."""
    multi_modal_data: dict[str, Any] | None = None
    response_versions: list[int] | None = None
    """Weight versions, one per response token; None: those that the engine reported."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards of single turns: (number of response tokens up to the turn's end, reward)."""
    finish_reason: str | None = None
    """Finish reason of the row: stop, length or abort; None: that of its last model call."""
    messages: list[dict[str, Any]] | None = None
    """The conversation of this context up to the model's last response, with tool calls and tool results, for a reward
    model that has its own chat template. None: derived from the tokens and from calls of `apply_chat_template`."""

    def __post_init__(self) -> None:
        if isinstance(self.metrics, Mapping):
            self.metrics = AgentLoopMetrics(**self.metrics)
        for name in ("response_mask", "response_logprobs", "response_versions"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(
                    f"AgentLoopOutput: {len(self.response_ids)} response_ids and {len(values)} {name}. Give one for"
                    " each token."
                )


class TrajectoryFailed(PicklableError):
    """Raised by a loop to fail its trajectory; counted in the metric `agent_loop/failures/<kind>`."""

    def __init__(self, message: str, kind: str = "loop") -> None:
        super().__init__(message)
        self.kind = kind


class _TokenIds(list[int]):
    """Token ids that can also be awaited: some loops call `apply_chat_template` with `await`, others without."""

    def __await__(self) -> Generator[None, None, list[int]]:
        yield from ()
        return self


class AgentLoopBase(ABC):
    """The loop of one trajectory: each has its own instance. All instances of a worker share an event loop, so `run`
    must not block.

    Constructors of subclasses take their own keywords and pass the others to `super().__init__`.
    """

    user_objects: ClassVar[tuple[str, ...]] = ()
    """Keywords whose values name objects in the user's files (`file.py:name`). The files are read where the run starts
    and sent to the workers; the constructor receives an `ImportPath`."""

    def __init__(
        self,
        *,
        config: PPOConfig,
        rollout_config: RolloutConfig,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        toolbox: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
        **own: Any,
    ) -> None:
        """`server_manager`: the EngineClient, which generates. `toolbox`: the tools. `own`: keywords of the entry in
        `agent_loop_config_path` that no subclass accepts (TypeError)."""
        self.config, self.rollout_config = config, rollout_config
        self.server_manager, self.tokenizer, self.processor, self.toolbox = (
            server_manager,
            tokenizer,
            processor,
            toolbox,
        )
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self.apply_chat_template_kwargs: dict[str, Any] = dict(config.data.apply_chat_template_kwargs)
        self._prefix_lengths: dict[str, int] = {}  # by keywords of the template
        if own:
            key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
            name = type(self).__name__
            raise TypeError(f"{name} does not accept the keywords {sorted(own)}. Check its entry in {key}.")

    @classmethod  # noqa: B027 - a hook
    def init_class(cls, config: PPOConfig, tokenizer: Any, processor: Any, **own: Any) -> None:
        """Hook: called once per process, before the first instance, to set up what all trajectories share."""

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Generate the trajectory of one row, whose columns are keywords (`raw_prompt`: the chat, `prompt_ids`: its
        tokens).

        A list of outputs is one trajectory with several training rows, one per context: the agent rewrote its context.
        """

    def apply_chat_template(
        self, messages: Messages, tools: Any = None, remove_system_prompt: bool = False, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of the messages with the generation prompt.

        `remove_system_prompt` removes the text that the template inserts before the first message.
        """
        ids = self._templated(list(messages), tools, add_generation_prompt=True, **template_kwargs)
        if remove_system_prompt:
            ids = ids[self._prefix_length(template_kwargs) :]
        if (trace := current_trace()) is not None:
            trace.rendered_messages[tuple(ids)] = [dict(message) for message in messages]
        return _TokenIds(ids)

    def _prefix_length(self, template_kwargs: Mapping[str, Any]) -> int:
        """Number of tokens that the template inserts before the first message."""
        key = repr(sorted({**self.apply_chat_template_kwargs, **template_kwargs}.items()))
        if key not in self._prefix_lengths:
            self._prefix_lengths[key] = self._measured_prefix_length(template_kwargs)
        return self._prefix_lengths[key]

    def _measured_prefix_length(self, template_kwargs: Mapping[str, Any]) -> int:
        user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
        refusals: list[Exception] = []
        for messages in ([user], [user, assistant]):  # many templates require alternating roles
            try:
                one, two = (self._templated(messages * count, None, **template_kwargs) for count in (1, 2))
                return _repetition_start(one, two)
            except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
                refusals.append(error)
        first, second = (f"{type(error).__name__}: {error}" for error in refusals)
        raise ValueError(
            "remove_system_prompt: the tokens that the chat template inserts before the first message are unknown."
            f" Found with user messages: {first}; with user and assistant messages: {second}."
            " Set data.apply_chat_template_kwargs.chat_template to another one, or do not remove the system prompt."
        ) from refusals[-1]

    def _templated(self, messages: list[Any], tools: Any, **template_kwargs: Any) -> list[int]:
        kwargs = self.apply_chat_template_kwargs | template_kwargs
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        most = max_characters(self.tokenizer, self.rollout_config.max_model_len)
        if len(text) > most:
            raise ValueError(
                f"apply_chat_template: the messages have {len(text)} characters; at most {most} can fit"
                f" rollout.max_model_len={self.rollout_config.max_model_len} tokens. Shorten them."
            )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _repetition_start(once: list[int], twice: list[int]) -> int:
    """Return the number of tokens before the messages that are rendered `once` and, repeated, `twice`.

    Tokens that the template writes after the last message are equal in both. If possible, there are none. ValueError:
    the start is unknown. It has several possible values if these tokens begin like a message, or if those before the
    first message end like one.
    """
    length = len(twice) - len(once)
    if length <= 0:
        raise ValueError("messages that are repeated are not rendered as more tokens")
    last = len(once) - length  # if nothing follows the messages
    starts = [start for start in range(last + 1) if twice == once[: start + length] + once[start:]]
    if not starts:
        raise ValueError("messages that are repeated are not rendered as repeated tokens")
    if last not in starts and len(starts) > 1:
        raise ValueError("what follows the last message cannot be distinguished from the start of a message")
    return starts[-1]


AGENT_LOOPS: Registry[type[AgentLoopBase]] = Registry("agent_name", names.AGENT_LOOPS)
register = register_agent_loop = AGENT_LOOPS.register


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """A configured loop: the import path of its class (with the contents of a user's file), and keywords of its
    constructor."""

    path: ImportPath
    keywords: Mapping[str, Any] = field(default_factory=dict)


def listed_loops(agent: AgentConfig) -> dict[str, LoopSpec]:
    """The configured loops by name: entries of `agent_loop_config_path`, and the default loop if it is in a file."""
    specs = {} if agent.agent_loop_config_path is None else read_loop_file(agent.agent_loop_config_path)
    default = agent.default_agent_loop
    if default not in specs and default not in AGENT_LOOPS and (":" in default or "." in default):
        specs[default] = LoopSpec(_read_path("actor_rollout_ref.rollout.agent.default_agent_loop", default))
    return specs


def read_loop_file(path: str) -> dict[str, LoopSpec]:
    """The loops by name in a YAML list of `{name, _target_, …constructor keywords}`."""
    import yaml

    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{key}: {path} contains a {type(entries).__name__}. Write a list of {{name, _target_, …}}.")
    specs = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise ValueError(f"{key}: entry {number} of {path} has no name or no _target_ (found: {entry!r}).")
        own = {name: value for name, value in entry.items() if name not in ("name", "_target_")}
        place = f"{key}: entry {number}"
        target = _read_path(place, str(entry["_target_"]))
        objects = imported_class(place, target, AgentLoopBase).user_objects
        own |= {name: _read_path(f"{place}: {name}", str(own[name])) for name in objects if name in own}
        specs[str(entry["name"])] = LoopSpec(target, own)
    return specs


def find_loop(name: str, listed: Mapping[str, LoopSpec]) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
    """The class of a loop and the keywords of its configuration entry.

    `name`: an entry of `listed`, a registered name, or a class of a module that is already imported (such as one of
    `external_libs`). Rows name loops, and data must not choose what is imported.
    """
    if name in listed:
        return imported_class(f"agent_name {name!r}", listed[name].path, AgentLoopBase), listed[name].keywords
    if name in AGENT_LOOPS or ("." not in name and ":" not in name):
        return AGENT_LOOPS.lookup(name), {}
    module, _, attribute = name.rpartition(".")
    loop = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    if not (isinstance(loop, type) and issubclass(loop, AgentLoopBase)):
        raise ValueError(
            f"agent_name: a row contains the import path {name!r}; data must not choose what is imported. Give the "
            "class a name in the file of actor_rollout_ref.rollout.agent.agent_loop_config_path, or import its module "
            "(external_libs)."
        )
    return loop, {}


def imported_class(key: str, place: str | ImportPath, base: type[Any]) -> type[Any]:
    """Import the subclass of `base` at `place` (`pkg.module.Class` or `file.py:Class`). Errors name the configuration
    key `key`."""
    path = _read_path(key, place) if isinstance(place, str) else place
    try:
        cls = path.load()
    except (ValueError, FileNotFoundError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{key}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"{key}: {path} is not a subclass of {base.__module__}.{base.__name__}.")
    return cls


def _read_path(key: str, place: str) -> ImportPath:
    try:
        return ImportPath.read(place)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{key}: {error}") from error
