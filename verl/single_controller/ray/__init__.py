"""Worker groups of Ray actors."""

from verl.single_controller.base.worker_group import create_colocated_worker_cls, create_colocated_worker_raw_cls
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourceError,
    ResourcePoolManager,
    merge_resource_pool,
)
from verl.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup

__all__ = [
    "BatchRef",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourceError",
    "ResourcePoolManager",
    "create_colocated_worker_cls",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
]
