"""The ranks of a supervised run: one in this process, those that torchrun started, or several as Ray actors."""

from __future__ import annotations

import logging
from typing import Any

from verl.config import SupervisedConfig
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.worker import collective_timeout
from verl.single_controller.torchrun import TorchrunWorkerGroup, serve_rank
from verl.trainer.common.launched import launched_ranks

logger = logging.getLogger(__name__)


class Ranks:
    """Starts workers of a class that takes the configuration; `group` calls them all, whichever kind it is."""

    def __init__(self, config: SupervisedConfig, worker_class: type) -> None:
        self._pool: Any = None
        self._made_process_group = False
        worker = ClassWithInitArgs(worker_class, config)
        if config.ranks == 1:
            self.group: Any = self._start_here(config, worker)
        elif launched_ranks() is not None:
            self.group = TorchrunWorkerGroup(worker, **_settings(config))
            self._made_process_group = True
        else:
            self.group = self._start_on_ray(config, worker)

    def close(self) -> None:
        """End the ranks and give back what they held."""
        import torch.distributed as dist

        self.group.shutdown()
        if self._pool is not None:
            self._pool.release()
        if self._made_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def _start_here(self, config: SupervisedConfig, worker: ClassWithInitArgs) -> Any:
        import torch.distributed as dist

        from verl.single_controller.local import LocalWorkerGroup

        self._made_process_group = not dist.is_initialized()
        return LocalWorkerGroup(ray_cls_with_init=worker, device_name=config.trainer.device)

    def _start_on_ray(self, config: SupervisedConfig, worker: ClassWithInitArgs) -> Any:
        from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

        trainer = config.trainer
        logger.info("Creating worker pool of %d ranks...", config.ranks)
        processes = [trainer.n_gpus_per_node] * trainer.nnodes
        self._pool = RayResourcePool(processes, use_gpu=trainer.device == "cuda", name_prefix="train")
        return RayWorkerGroup(self._pool, worker, **_settings(config))


def serve(config: SupervisedConfig) -> None:
    """Be one of the ranks that torchrun started, until the first of them, which runs the trainer, is done."""
    serve_rank(**_settings(config))


def _settings(config: SupervisedConfig) -> dict[str, Any]:
    trainer = config.trainer
    return {"device_name": trainer.device, "collective_timeout": collective_timeout(trainer.hang_timeout)}
