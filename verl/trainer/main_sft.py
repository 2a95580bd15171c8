"""Supervised fine-tuning: `python -m verl.trainer.main_sft key=value …` -> configuration -> SFTTrainer.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import SFTConfig, load_config
from verl.config.command_line import prepared_arguments
from verl.config.sft_rules import describe
from verl.trainer.common.cluster import start_ray
from verl.trainer.common.ending import ends_in_words, tells_of_restart, what_the_same_command_does
from verl.trainer.common.own_ray import OwnRay
from verl.trainer.common.signals import stop_on_signals
from verl.utils.logging_setup import shown_messages

logger = logging.getLogger("verl.trainer.main_sft")  # not "__main__", which is outside the one logging setup

_CONFIG_NAME = "sft_trainer"


def main() -> None:
    """Compose the command line with Hydra and run; a wrong configuration or wrong data lists every problem, exit 2."""
    with ends_in_words(), prepared_arguments(_CONFIG_NAME):
        _main()


@hydra.main(config_path="config", config_name=_CONFIG_NAME, version_base=None)
def _main(config: DictConfig) -> None:
    from verl.utils.logging_setup import setup_logging

    setup_logging()
    with ends_in_words():  # before Hydra says something of its own
        run_sft(config)


@shown_messages()
def run_sft(config: SFTConfig | DictConfig | Mapping[str, Any]) -> None:
    """Check the configuration, read the data, start the ranks (on Ray, if there are several) and train."""
    config = load_config(config, root=SFTConfig)
    for notice in config.notices:
        logger.warning(notice)
    logger.info(describe(config))

    from verl.planning.check import check_sft_memory
    from verl.trainer.sft.trainer import SFTTrainer

    check_sft_memory(config)

    with tells_of_restart(config.trainer), SFTTrainer(config) as trainer:
        own = OwnRay()
        if config.ranks > 1:
            import ray

            if not ray.is_initialized():
                own = start_ray(config.ray_init.num_cpus)
        trainer.start()
        with stop_on_signals(trainer.stop_requested.set, own.kill) as asked:
            trainer.fit()
        if asked.by is not None:
            logger.warning("stopped by %s; %s", asked.by, what_the_same_command_does(config.trainer))


if __name__ == "__main__":
    main()
