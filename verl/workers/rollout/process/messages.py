"""What a rollout and the host of its engine say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.single_controller.base.errors import Failure
from verl.types.request import Output
from verl.types.weights import Wanted
from verl.utils.exceptions import RemoteTraceback

__all__ = ["Answers", "Call", "Facts", "Moved", "Recipe", "Reply", "raised_there"]


@dataclass(frozen=True)
class Recipe:
    """What the engine is made of: the first message."""

    at: str
    """Its class, `module:Class`."""
    model_path: str
    model_config: ModelConfig
    config: RolloutConfig
    device: str
    threads: int
    """Processor threads of a computation, as in the process that asks: sums depend on it."""


@dataclass(frozen=True)
class Facts:
    """What is known of the engine once it is made: the reply to a recipe."""

    version: int
    weight_dtype: torch.dtype
    eos_token_ids: frozenset[int]
    pad_token_id: int
    wanted: Wanted | None


@dataclass(frozen=True)
class Call:
    """A method of the engine's. Without a number nobody waits for it."""

    number: int | None
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """To a call."""

    number: int
    value: Any
    failure: Failure | None = None


@dataclass(frozen=True)
class Answers:
    """To requests that have ended since the last ones, by the numbers that they were submitted with."""

    outputs: list[tuple[int, Output | Failure]]


@dataclass(frozen=True)
class Moved:
    """The engine's process made progress."""

    step: str | None = None
    """The current step of the engine's start; None: unknown, or the engine has started."""


def raised_there(failure: Failure) -> Exception:
    """The other side's exception as it was, with its traceback as the cause."""
    found = failure.exception()
    error = found if isinstance(found, Exception) else RuntimeError(failure.summary)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error
