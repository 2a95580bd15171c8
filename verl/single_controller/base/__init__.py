"""Workers, worker groups and their errors, independent of Ray."""

from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import (
    CallCancelled,
    ClassWithInitArgs,
    HangError,
    ResourcePool,
    WorkerCallError,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
)

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
