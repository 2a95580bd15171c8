"""Worker groups in the controller's own process."""

from verl.single_controller.base.worker_group import create_colocated_worker_cls
from verl.single_controller.local.worker_group import LocalWorkerGroup

__all__ = ["LocalWorkerGroup", "create_colocated_worker_cls"]
