"""Errors of rollout engines."""

from __future__ import annotations

__all__ = ["EngineBrokenError", "EngineDiedError", "EngineLostError"]


class EngineDiedError(RuntimeError):
    """The engine's own process or server is gone with all its state; `revive` starts it again, without weights."""


class EngineBrokenError(RuntimeError):
    """The engine failed inside a step and cannot be used any more: an engine in its own process exits."""


class EngineLostError(RuntimeError):
    """A replica cannot generate for this client any more."""
