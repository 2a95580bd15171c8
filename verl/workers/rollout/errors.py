"""Errors of rollout engines."""

from __future__ import annotations

__all__ = ["EngineBrokenError", "EngineDiedError", "EngineLostError"]


class EngineDiedError(RuntimeError):
    """The engine's own process or server has ended, with all its state. `BaseRollout.restart_if_dead` restarts it,
    without weights."""


class EngineBrokenError(RuntimeError):
    """The engine failed inside a step and cannot be used any more. An engine in its own process then exits."""


class EngineLostError(RuntimeError):
    """A replica was lost, or generation has ended: it cannot finish this request."""
