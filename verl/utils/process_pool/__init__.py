"""Killable processes: calls that may hang, crash or eat memory run in them and cost nobody but themselves."""

from verl.utils.process_pool.errors import CannotSend, InitializerError, PoolClosed, ProcessDied, TaskTimeout
from verl.utils.process_pool.pool import LOW_PRIORITY, ProcessPool, gathered

__all__ = [
    "LOW_PRIORITY",
    "CannotSend",
    "InitializerError",
    "PoolClosed",
    "ProcessDied",
    "ProcessPool",
    "TaskTimeout",
    "gathered",
]
