"""Reward-model training: `python -m verl.trainer.main_rm key=value …` -> configuration -> RMTrainer.

Neither torch nor ray is imported before the configuration has been validated.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import RMConfig
from verl.config.load import ConfigInput
from verl.trainer.common.command_line import command
from verl.trainer.supervised.launch import run_supervised_training


@command("rm_trainer")
def main(config: DictConfig) -> None:
    """Train a reward model on compared responses."""
    run_rm(config, supervised=True)


def run_rm(config: ConfigInput, supervised: bool = False) -> None:
    """Check the configuration, read the data, start the ranks (on Ray, if there are several) and train.

    `supervised`: as in `run_ppo`.
    """
    run_supervised_training(config, RMConfig, _trainer_class, supervised)


def _trainer_class() -> type:
    from verl.trainer.supervised.rm import RMTrainer

    return RMTrainer


if __name__ == "__main__":
    main()
