"""Worker processes for calls that may hang, crash or exhaust memory: such a call fails alone."""

from verl.utils.process_pool.fork_server import CannotSend, InitializerError, PoolClosed, ProcessDied, TaskTimeout
from verl.utils.process_pool.pool import LOW_PRIORITY, ProcessPool, gather_results

__all__ = [
    "LOW_PRIORITY",
    "CannotSend",
    "InitializerError",
    "PoolClosed",
    "ProcessDied",
    "ProcessPool",
    "TaskTimeout",
    "gather_results",
]
