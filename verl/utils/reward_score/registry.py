"""The table from `data_source` to reward function; a decorator adds to it. Names may be patterns (`aime*`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

Result = float | dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

UNKNOWN_SOURCE = "unknown"
"""Data source that is passed to the reward function for rows without one."""
_BUILT_IN = "verl.utils.reward_score."


@dataclass(frozen=True)
class ScoreFunction:
    """A reward function, and what tools may ask about its task."""

    compute: Callable[..., Result]
    # A right answer in the right format, made from the ground truth (None: not from this one); checks score it.
    answer: Callable[[Any], str | None] | None = None
    # What the function takes for the answer in a text, None if it finds none; explains rewards that are always 0.
    extract: Callable[[str], Any] | None = None
    # What the run's configuration adds to every call.
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any
    ) -> Result:
        return call_with_accepted(
            self.compute,
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **{**self.arguments, **kwargs},
        )


_TABLE: dict[str, ScoreFunction] = {}


def register_score(
    *data_sources: str, answer: Callable[[Any], str | None] | None = None, extract: Callable[[str], Any] | None = None
) -> Callable[[Function], Function]:
    """Decorate a `compute_score(solution_str, ground_truth, …)` to score the rows of these data sources.

    It returns a number, or a dict with `score` and whatever else should be logged; parameters `data_source` and
    `extra_info` are filled where it has them. In a name, `*` stands for anything; a whole name goes before patterns, a
    longer pattern before a shorter one. `answer` makes a right answer from a ground truth, `extract` finds the answer
    in a text: checks and explanations use them.
    """

    def add(function: Function) -> Function:
        for source in data_sources:
            known = _TABLE.get(source)
            if known is not None and _name(known.compute) != _name(function):
                raise ValueError(
                    f"data_source {source!r}: {_name(known.compute)} already scores it. Register another name, or set "
                    "custom_reward_function.path to replace it."
                )
            _TABLE[source] = ScoreFunction(function, answer, extract)
        return function

    return add


def set_arguments(function: Callable[..., Any], **arguments: Any) -> None:
    """From now on the rows that this function scores are scored with these arguments, in scorer processes too."""
    for source, entry in _TABLE.items():
        if entry.compute is function:
            _TABLE[source] = replace(entry, arguments=arguments)


def known_data_sources() -> list[str]:
    """Every data source with a reward function; some are patterns."""
    return sorted(_TABLE)


def matching(data_source: str, known: Collection[str]) -> str | None:
    """The name or pattern among `known` that a data source goes by; None if there is none."""
    if data_source in known:
        return data_source
    return max((name for name in known if "*" in name and fnmatchcase(data_source, name)), key=len, default=None)


def score_function(data_source: str) -> ScoreFunction:
    """The reward function of a data source; a ValueError lists the known ones."""
    name = matching(str(data_source), _TABLE)
    if name is None:
        raise ValueError(unknown_source(str(data_source), _TABLE))
    return _TABLE[name]


def unknown_source(data_source: str, known: Iterable[str], key: str = "data_source") -> str:
    """What to tell about a data source that has no reward function."""
    from verl.config.problems import closest

    names = sorted(known)
    near = closest(data_source, [name for name in names if "*" not in name])
    hint = f" Did you mean {near!r}?" if near else ""
    return (
        f"no reward function is known for {key} {data_source!r}.{hint} Set custom_reward_function.path, or register one"
        f" with verl.utils.reward_score.register_score. Known: {', '.join(names)}."
    )


def _select_rm_score_fn(data_source: str) -> Callable[..., Result]:
    """The plain `compute_score(solution_str, ground_truth, …)` of a data source, as scripts of users call it."""
    return score_function(data_source).compute


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Result:
    """The score of an answer by the function registered for its data source; `kwargs` go to that function."""
    return score_function(data_source)(data_source, solution_str, ground_truth, extra_info, **kwargs)


def call_with_accepted(
    function: Callable[..., Result], *, data_source: str, extra_info: Any, raw_prompt: Any = None, **arguments: Any
) -> Result:
    """Call a reward function; `data_source`, `extra_info` and `raw_prompt` are given where it has such parameters."""
    named, takes_any = _parameters(function)
    if "raw_prompt" in named:
        arguments["raw_prompt"] = raw_prompt
    if takes_any or "data_source" in named:
        arguments["data_source"] = data_source
    if takes_any or "extra_info" in named:
        arguments["extra_info"] = extra_info
    return function(**arguments)


def users_own() -> dict[str, ScoreFunction]:
    """What was registered outside this package, or got arguments; a scorer process must be told of it."""
    return {
        source: entry
        for source, entry in _TABLE.items()
        if entry.arguments or not entry.compute.__module__.startswith(_BUILT_IN)
    }


def add_all(entries: dict[str, ScoreFunction]) -> None:
    """The other end of `users_own`."""
    _TABLE.update(entries)


@functools.lru_cache
def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    found = inspect.signature(function).parameters
    return frozenset(found), any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
