"""Errors of the process pool. Exceptions of the called function are re-raised unchanged."""

from __future__ import annotations


class TaskTimeout(TimeoutError):
    """The call exceeded its time limit; its process and all child processes were killed."""


class ProcessDied(RuntimeError):
    """The call ended its process: by exit, by a signal, or by a crash."""


class CannotSend(ValueError):
    """Arguments, a result or an initializer cannot be pickled, or cannot be unpickled by the receiver."""


class InitializerError(ValueError):
    """The initializer failed in the new process; the message is its traceback."""


class PoolClosed(RuntimeError):
    """The pool was closed, or lost its fork server, before the call finished."""
