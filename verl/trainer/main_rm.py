"""Reward-model training: `python -m verl.trainer.main_rm key=value …` -> configuration -> RMTrainer.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import RMConfig
from verl.config.load import Given
from verl.trainer.common.command_line import command
from verl.trainer.common.supervised_command import run_supervised_training


@command("rm_trainer")
def main(config: DictConfig) -> None:
    """Train a reward model on answers that were compared."""
    run_rm(config, supervised=True)


def run_rm(config: Given, supervised: bool = False) -> None:
    """Check the configuration, read the data, start the ranks (on Ray, if there are several) and train.

    `supervised`: as in `run_ppo`.
    """
    run_supervised_training(config, RMConfig, _trainer_class, supervised)


def _trainer_class() -> type:
    from verl.trainer.rm.trainer import RMTrainer

    return RMTrainer


if __name__ == "__main__":
    main()
