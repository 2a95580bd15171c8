"""The command of a supervised run: configuration -> memory plan -> ranks (on Ray, if there are several) -> training.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from verl.config import SupervisedConfig, load_config
from verl.config.load import Given
from verl.config.supervised import describe
from verl.trainer.common.cluster import start_ray, wait_for_nodes
from verl.trainer.common.command_line import checked
from verl.trainer.common.completion import log_finished
from verl.trainer.common.ending import tells_of_restart, what_the_same_command_does
from verl.trainer.common.launched import launched_ranks
from verl.trainer.common.own_ray import OwnRay, watched
from verl.trainer.common.preflight import supervised_preflight
from verl.trainer.common.signals import RUN_ENDED, before_first_step, exit_on_signals, stop_on_signals
from verl.trainer.supervision.report import earlier_attempts
from verl.trainer.supervision.supervisor import supervise, wants_supervision
from verl.utils.logging_setup import messages_on_stderr

logger = logging.getLogger(__name__)


@messages_on_stderr()
def run_supervised_training(
    config: Given, root: type[SupervisedConfig], trainer_class: Callable[[], type], supervised: bool
) -> None:
    """Check the configuration, a `root`, and run a trainer of the class that `trainer_class` imports.

    `supervised`: as in `run_ppo`. Under torchrun, which starts a failed run again itself, the processes that it
    started are the ranks.
    """
    launched, is_program = launched_ranks(), supervised
    if launched is not None:
        rank, nodes, ranks = launched
        sizes, supervised = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={ranks}"], False
        if rank > 0:
            from verl.trainer.common.ranks import serve

            serve(load_config(config, sizes, root=root))
            return
    config = checked(config, root, [] if launched is None else sizes, preflight=supervised_preflight)
    logger.info(describe(config))
    with tells_of_restart(config.trainer):
        attempt = supervise(config).config if wants_supervision(config, supervised) else config
        by = _train(attempt, trainer_class, is_program)
        if by is not None:
            logger.warning("stopped by %s; %s", by, what_the_same_command_does(config.trainer))
        else:
            log_finished(config.trainer)


def _train(config: SupervisedConfig, trainer_class: Callable[[], type], is_program: bool) -> str | None:
    """The signal that ended the run, if one did. `is_program`: nothing follows the run in this process."""
    from verl.planning.check import check_supervised_memory

    with before_first_step():
        check_supervised_memory(config)
        trainer = trainer_class()(config)
    with trainer:
        on_ray = config.ranks > 1 and launched_ranks() is None
        with before_first_step():
            own = _join_or_start_ray(config) if on_ray else OwnRay()
        with stop_on_signals(trainer.stop_requested.set, own.kill, starting=lambda: trainer.status.starting) as asked:
            trainer.start()
            if on_ray:
                watched(lambda: _fit_and_close(trainer), own, asked)
            else:
                _fit_and_close(trainer)
        if is_program:
            exit_on_signals(RUN_ENDED)
        return asked.by


def _join_or_start_ray(config: SupervisedConfig) -> OwnRay:
    import ray

    own = OwnRay()
    if not ray.is_initialized():
        again = earlier_attempts() > 0
        within, start = config.trainer.nodes_within if again else 0, config.ray_init
        own = start_ray(start.num_cpus, within, start.start_timeout)
        if not own:
            pool = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
            wait_for_nodes(config.trainer, [pool], again)
    return own or OwnRay(gcs=ray.get_runtime_context().gcs_address)


def _fit_and_close(trainer: Any) -> None:
    """Closing waits for what is still written and copied: that, too, is watched."""
    with trainer:
        trainer.fit()
