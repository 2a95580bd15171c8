"""Worker groups of the processes that torchrun started."""

from verl.single_controller.torchrun.worker_group import TorchrunWorkerGroup, serve_rank

__all__ = ["TorchrunWorkerGroup", "serve_rank"]
