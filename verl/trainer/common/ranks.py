"""The ranks of a supervised run: one in this process (breakpoints work, no Ray), or several as Ray actors."""

from __future__ import annotations

import logging
from typing import Any

from verl.config import SupervisedConfig
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.worker import collective_timeout

logger = logging.getLogger(__name__)


class Ranks:
    """Starts workers of a class that takes the configuration; `group` calls them all, whichever kind it is."""

    def __init__(self, config: SupervisedConfig, worker_class: type) -> None:
        self._pool: Any = None
        self._made_process_group = False
        worker = ClassWithInitArgs(worker_class, config)
        if config.ranks == 1:
            self.group: Any = self._start_here(config, worker)
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
        return RayWorkerGroup(
            self._pool, worker, device_name=trainer.device, collective_timeout=collective_timeout(trainer.hang_timeout)
        )
