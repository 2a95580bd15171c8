"""Workers, worker groups and their errors, independent of Ray."""

from verl.single_controller.base.errors import CallCancelled, HangError, WorkerCallError, WorkerDiedError, WorkerError
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = [
    "CallCancelled",
    "ClassWithInitArgs",
    "HangError",
    "ResourcePool",
    "Worker",
    "WorkerCallError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
]
