"""Supervised fine-tuning: `python -m verl.trainer.main_sft key=value …` -> configuration -> SFTTrainer.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig

from verl.config import SFTConfig
from verl.config.load import Given
from verl.config.sft_rules import describe
from verl.trainer.common.cluster import start_ray, wait_for_nodes
from verl.trainer.common.command_line import checked, command
from verl.trainer.common.ending import tells_of_restart, what_the_same_command_does
from verl.trainer.common.own_ray import OwnRay, watched
from verl.trainer.common.signals import stop_on_signals
from verl.trainer.supervision.report import earlier_attempts
from verl.trainer.supervision.supervisor import supervise, wants_supervision
from verl.utils.logging_setup import shown_messages

logger = logging.getLogger("verl.trainer.main_sft")  # not "__main__", which is outside the one logging setup


@command("sft_trainer")
def main(config: DictConfig) -> None:
    """Fine-tune a model on answers that are given."""
    run_sft(config, supervised=True)


@shown_messages()
def run_sft(config: Given, supervised: bool = False) -> None:
    """Check the configuration, read the data, start the ranks (on Ray, if there are several) and train.

    `supervised`: as in `run_ppo`.
    """
    config = checked(config, SFTConfig)
    logger.info(describe(config))
    with tells_of_restart(config.trainer):
        attempt = supervise(config).config if wants_supervision(config, supervised) else config
        by = _train(attempt)
        if by is not None:
            logger.warning("stopped by %s; %s", by, what_the_same_command_does(config.trainer))


def _train(config: SFTConfig) -> str | None:
    """The signal that ended the run, if one did."""
    from verl.planning.check import check_sft_memory
    from verl.trainer.sft.trainer import SFTTrainer

    check_sft_memory(config)
    with SFTTrainer(config) as trainer:
        own = OwnRay()
        if config.ranks > 1:
            import ray

            if not ray.is_initialized():
                again = earlier_attempts() > 0
                own = start_ray(config.ray_init.num_cpus, within=config.trainer.nodes_within if again else 0)
                if not own:
                    pool = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
                    wait_for_nodes(config.trainer, [pool], again)
            own = own or OwnRay(gcs=ray.get_runtime_context().gcs_address)
        trainer.start()
        with stop_on_signals(trainer.stop_requested.set, own.kill) as asked:
            if config.ranks == 1:
                trainer.fit()
            else:
                watched(lambda: _fit_and_close(trainer), own, asked)
        return asked.by


def _fit_and_close(trainer: Any) -> None:
    """Closing waits for what is still written and copied: that, too, is watched."""
    with trainer:
        trainer.fit()


if __name__ == "__main__":
    main()
