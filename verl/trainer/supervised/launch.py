"""Launch supervised training: configuration -> memory check -> ranks -> training.

A single rank runs in this process. Several ranks are the processes started by torchrun, or Ray actors. Neither torch
nor ray is imported before the configuration has been validated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from verl.config import SupervisedConfig, load_config
from verl.config.load import ConfigInput
from verl.config.supervised import describe
from verl.trainer.common.command_line import validated_config
from verl.trainer.common.preflight import supervised_preflight
from verl.trainer.common.ray_cluster import start_or_join_ray
from verl.trainer.common.status_display import without_prefixes
from verl.trainer.recovery.exit_messages import attach_resume_hint, describe_resume, log_finished
from verl.trainer.recovery.ray_monitor import RayProcesses, run_monitored
from verl.trainer.recovery.signals import RUN_ENDED, exit_on_signals, stop_on_signals
from verl.trainer.recovery.supervised_process import before_first_step
from verl.trainer.recovery.supervisor import supervise, wants_supervision
from verl.utils.console import LINE, show_startup, startup_phase
from verl.utils.logging_setup import messages_on_stderr

logger = logging.getLogger(__name__)


@messages_on_stderr()
def run_supervised_training(
    config: ConfigInput, root: type[SupervisedConfig], trainer_class: Callable[[], type], supervised: bool
) -> None:
    """Check the configuration and train. `root`: class of the configuration. `trainer_class()` imports and returns the
    trainer's class. `supervised`: as in `run_ppo`; ignored under torchrun, which restarts a failed run itself.
    """
    launched, is_program = torchrun_ranks(), supervised
    overrides: list[str] = []
    if launched is not None:
        rank, nodes, ranks_per_node = launched
        overrides = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={ranks_per_node}"]
        supervised = False
        if rank > 0:
            from verl.single_controller.local import serve_rank

            serve_rank(**_group_settings(load_config(config, overrides, root=root)))
            return
    config = validated_config(config, root, overrides, preflight=supervised_preflight)
    logger.info(describe(config))
    with attach_resume_hint(config.trainer):
        attempt_config = supervise(config).config if wants_supervision(config, supervised) else config
        stopped_by = _train(attempt_config, trainer_class, is_program)
        if stopped_by is not None:
            logger.warning("stopped by %s; %s", stopped_by, describe_resume(config.trainer))
        else:
            log_finished(config.trainer, merge_backend="fsdp" if config.trainer.console == LINE else None)


def _train(config: SupervisedConfig, trainer_class: Callable[[], type], is_program: bool) -> str | None:
    """Train; return the signal that stopped the run, or None. `is_program`: nothing follows the run in this process."""
    one_line = config.trainer.console == LINE
    with before_first_step(), show_startup(one_line):
        with startup_phase("memory plan"):
            from verl.planning.check import check_supervised_memory

            plan = check_supervised_memory(config)
        with startup_phase("imports"):
            cls = trainer_class()
        with startup_phase("data"):
            trainer = cls(config)
            trainer.recorder.memory_plan = plan

    def fit_and_close() -> None:
        with trainer:  # its exit waits for saves and copies, which are monitored too
            trainer.fit()

    with trainer:
        on_ray = config.ranks > 1 and torchrun_ranks() is None
        with before_first_step(), show_startup(one_line and on_ray), startup_phase("Ray"):
            processes = _start_ray(config) if on_ray else RayProcesses()
        with (
            without_prefixes() if one_line and on_ray else nullcontext(),
            stop_on_signals(
                trainer.stop_requested.set, processes.kill, is_starting=lambda: trainer.status.starting
            ) as request,
        ):
            with before_first_step(), show_startup(one_line), startup_phase("weights"):
                trainer.start()
            if on_ray:
                run_monitored(fit_and_close, processes, request)
            else:
                fit_and_close()
        if is_program:
            exit_on_signals(RUN_ENDED)
        return request.signal


def _start_ray(config: SupervisedConfig) -> RayProcesses:
    trainer, ray_init = config.trainer, config.ray_init
    pool = [trainer.n_gpus_per_node] * trainer.nnodes
    return start_or_join_ray(trainer, [pool], num_cpus=ray_init.num_cpus, start_timeout=ray_init.start_timeout)


class Ranks:
    """Starts one worker of `worker_class(config)` per rank: in this process, in those of torchrun, or on Ray.

    `group` is their worker group.
    """

    def __init__(self, config: SupervisedConfig, worker_class: type) -> None:
        from verl.single_controller.base import ClassWithInitArgs

        self._pool: Any = None
        self._owns_process_group = False
        worker = ClassWithInitArgs(worker_class, config)
        if config.ranks == 1:
            self.group: Any = self._start_in_process(config, worker)
        elif torchrun_ranks() is not None:
            from verl.single_controller.local import TorchrunWorkerGroup

            self.group = TorchrunWorkerGroup(worker, **_group_settings(config))
            self._owns_process_group = True
        else:
            self.group = self._start_on_ray(config, worker)

    def close(self) -> None:
        """End the ranks and release their resources."""
        import torch.distributed as dist

        self.group.shutdown()
        if self._pool is not None:
            self._pool.release()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def _start_in_process(self, config: SupervisedConfig, worker: Any) -> Any:
        import torch.distributed as dist

        from verl.single_controller.local import LocalWorkerGroup

        self._owns_process_group = not dist.is_initialized()
        return LocalWorkerGroup(ray_cls_with_init=worker, device_name=config.trainer.device)

    def _start_on_ray(self, config: SupervisedConfig, worker: Any) -> Any:
        from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

        trainer = config.trainer
        logger.info("Creating worker pool of %d ranks...", config.ranks)
        processes = [trainer.n_gpus_per_node] * trainer.nnodes
        self._pool = RayResourcePool(processes, use_gpu=trainer.device == "cuda", name_prefix="train")
        return RayWorkerGroup(self._pool, worker, **_group_settings(config))


def torchrun_ranks() -> tuple[int, int, int] | None:
    """Return (rank of this process, nodes, ranks per node) if torchrun started several processes; else None."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or ranks == 1:
        return None
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ["RANK"]), ranks // ranks_per_node, ranks_per_node


def _group_settings(config: SupervisedConfig) -> dict[str, Any]:
    from verl.single_controller.base.worker import collective_timeout

    trainer = config.trainer
    return {"device_name": trainer.device, "collective_timeout": collective_timeout(trainer.hang_timeout)}
