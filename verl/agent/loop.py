"""AgentLoopBase: how one trajectory comes about. A loop asks the model, answers it, and says which tokens were whose.

Loops are found by name: ours in a table, users' by `@register`, by a YAML list, or by where their class is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.config import AgentConfig, PPOConfig, RolloutConfig, names
from verl.types.request import TokenOutput
from verl.utils.exceptions import Travels
from verl.utils.import_utils import ImportPath
from verl.utils.registry import Registry
from verl.workers.rollout.call_record import current

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
]

Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class AgentLoopMetrics:
    """What a trajectory took, in seconds, and what happened in it. Generation is measured where it is asked for."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    """Seconds in tools."""
    compute_score: float = 0.0
    num_preempted: int = 0
    tool_call_counts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """How often what went wrong: malformed, unknown, arguments, exception, timeout, limit …"""
    tools: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each tool `calls`, `errors`, `seconds`."""


@dataclass(slots=True)
class AgentLoopOutput:
    """One context of a trajectory: a prompt, and what the model and its environment appended to it."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 on tokens that the model sampled."""
    response_logprobs: list[float] | None = None
    """One per response token; None: those that the server told."""
    reward_score: float | None = None
    """Set: the trajectory is not scored any further. Of several outputs the last one's counts."""
    num_turns: int = 0
    """Turns that this output adds to its trajectory. If 0 in all outputs, prompts, answers and replies are counted."""
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Columns of the trajectory's rows."""
    multi_modal_data: dict[str, Any] | None = None
    response_versions: list[int] | None = None
    """Of the weights, one per response token; None: those that the server told."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(number of response tokens by then, reward): what turns earned by themselves."""
    finish_reason: str | None = None
    """What ended the row: stop, length or abort; None: the engine's finish reason of its last call."""
    messages: list[dict[str, Any]] | None = None
    """The conversation of this context up to the model's last answer, with tool calls and tool results, for a reward
    model that has its own chat template. None: derived from the tokens, and from calls of `apply_chat_template`."""

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


class TrajectoryFailed(Travels):
    """What a loop raises to be counted under a name: `kind` is that of the metric `agent_loop/failures/<kind>`."""

    def __init__(self, message: str, kind: str = "loop") -> None:
        super().__init__(message)
        self.kind = kind


class _TokenIds(list[int]):
    """Token ids that may be awaited too: some loops call `apply_chat_template` with `await`, others without."""

    def __await__(self) -> Generator[None, None, list[int]]:
        yield from ()
        return self


class AgentLoopBase(ABC):
    """One trajectory's loop: an instance for each, all of a worker's in one event loop, so that `run` may not block.

    Constructors of subclasses take the keywords they know and pass the others on.
    """

    user_objects: ClassVar[tuple[str, ...]] = ()
    """Keywords that name something of the user's own (`file.py:name`): read where the run starts, so that it travels,
    and given as an `ImportPath`."""

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
        """`server_manager` generates; `toolbox` has the tools; `own` are keywords of `agent_loop_config_path`."""
        self.config, self.rollout_config = config, rollout_config
        self.server_manager, self.tokenizer, self.processor, self.toolbox = (
            server_manager,
            tokenizer,
            processor,
            toolbox,
        )
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self.apply_chat_template_kwargs: dict[str, Any] = dict(config.data.apply_chat_template_kwargs)
        if own:
            key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
            raise TypeError(f"{type(self).__name__} knows no keyword {sorted(own)}. Check its entry in {key}.")

    @classmethod  # noqa: B027 - a hook
    def init_class(cls, config: PPOConfig, tokenizer: Any, processor: Any, **own: Any) -> None:
        """Called once in each process, before the first instance: for what all trajectories share."""

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The trajectory of one row, whose columns are keywords (`raw_prompt`: the chat, `prompt_ids`: its tokens).

        Several outputs are several training rows of one trajectory: each time the context was rewritten.
        """

    def apply_chat_template(
        self, messages: Messages, tools: Any = None, remove_system_prompt: bool = False, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of the messages with the generation prompt.

        `remove_system_prompt` leaves out what the template writes before the first message by itself.
        """
        ids = self._templated(list(messages), tools, add_generation_prompt=True, **template_kwargs)
        if remove_system_prompt:
            once, twice = ([{"role": "user", "content": ""}] * times for times in (1, 2))
            first, second = (self._templated(some, None, **template_kwargs) for some in (once, twice))
            ids = ids[2 * len(first) - len(second) :]
        if (record := current()) is not None:
            record.templated[tuple(ids)] = [dict(message) for message in messages]
        return _TokenIds(ids)

    def _templated(self, messages: list[Any], tools: Any, **template_kwargs: Any) -> list[int]:
        kwargs = self.apply_chat_template_kwargs | template_kwargs
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


AGENT_LOOPS: Registry[type[AgentLoopBase]] = Registry("agent_name", names.AGENT_LOOPS)
register = AGENT_LOOPS.register


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """A loop by name: where its class is (users' files by content: they travel), keywords for its constructor."""

    path: ImportPath
    keywords: Mapping[str, Any] = field(default_factory=dict)


def listed_loops(agent: AgentConfig) -> dict[str, LoopSpec]:
    """What the configuration says of loops: the list of `agent_loop_config_path`, and a default that is a file's."""
    found = {} if agent.agent_loop_config_path is None else read_loop_file(agent.agent_loop_config_path)
    default = agent.default_agent_loop
    if default not in found and ":" in default:
        found[default] = LoopSpec(_read_path("actor_rollout_ref.rollout.agent.default_agent_loop", default))
    return found


def read_loop_file(path: str) -> dict[str, LoopSpec]:
    """The YAML list of `{name, _target_, …constructor keywords}` by name."""
    import yaml

    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{key}: {path} holds a {type(entries).__name__}. Write a list of {{name, _target_, …}}.")
    found = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise ValueError(f"{key}: entry {number} of {path} has no name or no _target_ (found: {entry!r}).")
        own = {name: value for name, value in entry.items() if name not in ("name", "_target_")}
        place = f"{key}: entry {number}"
        target = _read_path(place, str(entry["_target_"]))
        objects = imported_class(place, target, AgentLoopBase).user_objects
        own |= {name: _read_path(f"{place}: {name}", str(own[name])) for name in objects if name in own}
        found[str(entry["name"])] = LoopSpec(target, own)
    return found


def find_loop(name: str, listed: Mapping[str, LoopSpec]) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
    """The class under a name and its own keywords: as listed, as registered, or where the name itself says it is
    (`pkg.module.Class`, `file.py:Class`)."""
    if name in listed:
        return imported_class(f"agent_name {name!r}", listed[name].path, AgentLoopBase), listed[name].keywords
    if name not in AGENT_LOOPS and ("." in name or ":" in name):
        return imported_class("agent_name", name, AgentLoopBase), {}
    return AGENT_LOOPS.lookup(name), {}


def imported_class(key: str, place: str | ImportPath, base: type[Any]) -> type[Any]:
    """The subclass of `base` at `pkg.module.Class` or `file.py:Class`, which `key` says."""
    path = _read_path(key, place) if isinstance(place, str) else place
    try:
        found = path.load()
    except (ValueError, FileNotFoundError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{key}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key}: {path} is no subclass of {base.__module__}.{base.__name__}.")
    return found


def _read_path(key: str, place: str) -> ImportPath:
    try:
        return ImportPath.read(place)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{key}: {error}") from error
