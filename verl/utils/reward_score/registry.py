"""The registry of reward functions by `data_source`; names may be patterns (`aime*`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

Score = float | dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

UNKNOWN_SOURCE = "unknown"
"""Data source of rows without one, as passed to the reward function."""
_BUILT_IN = "verl.utils.reward_score."


@dataclass(frozen=True)
class ScoreFunction:
    """A reward function, and helpers for checks of its task."""

    compute: Callable[..., Score]
    # Formats a ground truth as a correct response (None: not possible for this one); checks score it.
    answer: Callable[[Any], str | None] | None = None
    # Extracts the answer from a response, None without one; explains rewards that are always 0.
    extract: Callable[[str], Any] | None = None
    # Arguments from the configuration, added to every call.
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any) -> Score:
        return call_with_accepted(
            self.compute,
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **{**self.arguments, **kwargs},
        )


SCORE_FUNCTIONS: dict[str, ScoreFunction] = {}


def register_score(
    *data_sources: str, answer: Callable[[Any], str | None] | None = None, extract: Callable[[str], Any] | None = None
) -> Callable[[Function], Function]:
    """Decorate a `compute_score(solution_str, ground_truth, …)` to score the rows of these data sources.

    It returns a number, or a dict with `score` and other values to log; it receives `data_source` and `extra_info` if
    it has such parameters. In a name, `*` matches anything; a full name takes precedence over patterns, a longer
    pattern over a shorter one. `answer` formats a ground truth as a correct response, `extract` returns the answer of a
    response: checks and explanations use them.
    """

    def add(function: Function) -> Function:
        for source in data_sources:
            existing = SCORE_FUNCTIONS.get(source)
            if existing is not None and _name(existing.compute) != _name(function):
                raise ValueError(
                    f"data_source {source!r}: {_name(existing.compute)} already scores it. Register another name, or"
                    " set custom_reward_function.path to replace it."
                )
            SCORE_FUNCTIONS[source] = ScoreFunction(function, answer, extract)
        return function

    return add


def set_arguments(function: Callable[..., Any], **arguments: Any) -> None:
    """Set the arguments that are added to every call of this function, also in scorer processes."""
    for source, entry in SCORE_FUNCTIONS.items():
        if entry.compute is function:
            SCORE_FUNCTIONS[source] = replace(entry, arguments=arguments)


def known_data_sources() -> list[str]:
    """Every data source with a reward function; some are patterns."""
    return sorted(SCORE_FUNCTIONS)


def matching(data_source: str, known: Collection[str]) -> str | None:
    """The name or pattern among `known` that matches a data source; None without a match."""
    if data_source in known:
        return data_source
    return max((name for name in known if "*" in name and fnmatchcase(data_source, name)), key=len, default=None)


def score_function(data_source: str) -> ScoreFunction:
    """The reward function of a data source; a ValueError lists the known ones."""
    name = matching(str(data_source), SCORE_FUNCTIONS)
    if name is None:
        raise ValueError(unknown_source(str(data_source), SCORE_FUNCTIONS))
    return SCORE_FUNCTIONS[name]


def unknown_source(data_source: str, known: Iterable[str], key: str = "data_source") -> str:
    """The error message for a data source without a reward function."""
    from verl.config.problems import closest

    names = sorted(known)
    near = closest(data_source, [name for name in names if "*" not in name])
    hint = f" Did you mean {near!r}?" if near else ""
    return (
        f"no reward function is known for {key} {data_source!r}.{hint} Set custom_reward_function.path, or register one"
        f" with verl.utils.reward_score.register_score. Known: {', '.join(names)}."
    )


def _select_rm_score_fn(data_source: str) -> Callable[..., Score]:
    """The plain `compute_score(solution_str, ground_truth, …)` of a data source, as scripts of users call it."""
    return score_function(data_source).compute


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Score:
    """Return the score of a response by the function of its data source; `kwargs` are passed to that function."""
    return score_function(data_source)(data_source, solution_str, ground_truth, extra_info, **kwargs)


def call_with_accepted(
    function: Callable[..., Score], *, data_source: str, extra_info: Any, raw_prompt: Any = None, **arguments: Any
) -> Score:
    """Call a reward function. `data_source` and `extra_info` are passed if it has such parameters or `**kwargs`,
    `raw_prompt` only if it has this parameter."""
    named, takes_any = _parameters(function)
    if "raw_prompt" in named:
        arguments["raw_prompt"] = raw_prompt
    if takes_any or "data_source" in named:
        arguments["data_source"] = data_source
    if takes_any or "extra_info" in named:
        arguments["extra_info"] = extra_info
    return function(**arguments)


def user_functions() -> dict[str, ScoreFunction]:
    """Functions that were registered outside this package or have arguments; sent to scorer processes."""
    return {
        source: entry
        for source, entry in SCORE_FUNCTIONS.items()
        if entry.arguments or not entry.compute.__module__.startswith(_BUILT_IN)
    }


def register_all(entries: dict[str, ScoreFunction]) -> None:
    """Register the functions of `user_functions`, in a scorer process."""
    SCORE_FUNCTIONS.update(entries)


@functools.lru_cache
def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(function).parameters
    return frozenset(parameters), any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
