"""What a process pool says when a call gives no value; what the call itself raised comes as it is."""

from __future__ import annotations


class TaskTimeout(TimeoutError):
    """It took longer than its time limit; its process and all that it started were killed."""


class ProcessDied(RuntimeError):
    """It ended its process: an exit, a signal, a crash."""


class CannotSend(ValueError):
    """Arguments, a result or an initializer cannot be pickled, or not be read on the other side."""


class InitializerError(ValueError):
    """The initializer fails in a process that starts from scratch; the text is the traceback there."""


class PoolClosed(RuntimeError):
    """The pool was closed, or lost its fork server, before the call was done."""
