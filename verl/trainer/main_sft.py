"""Supervised fine-tuning: `python -m verl.trainer.main_sft key=value …` -> configuration -> SFTTrainer.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import SFTConfig
from verl.config.load import Given
from verl.trainer.common.command_line import command
from verl.trainer.common.supervised_command import run_supervised_training


@command("sft_trainer")
def main(config: DictConfig) -> None:
    """Fine-tune a model on answers that are given."""
    run_sft(config, supervised=True)


def run_sft(config: Given, supervised: bool = False) -> None:
    """Check the configuration, read the data, start the ranks (on Ray, if there are several) and train.

    `supervised`: as in `run_ppo`.
    """
    run_supervised_training(config, SFTConfig, _trainer_class, supervised)


def _trainer_class() -> type:
    from verl.trainer.sft.trainer import SFTTrainer

    return SFTTrainer


if __name__ == "__main__":
    main()
