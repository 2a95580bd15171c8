"""Supervised fine-tuning: `python -m verl.trainer.main_sft key=value …` -> configuration -> SFTTrainer.

Neither torch nor ray is imported before the configuration has been validated.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import SFTConfig
from verl.config.load import ConfigInput
from verl.trainer.common.command_line import command
from verl.trainer.supervised.launch import run_supervised_training


@command("sft_trainer")
def main(config: DictConfig) -> None:
    """Fine-tune a model on given responses."""
    run_sft(config, supervised=True)


def run_sft(config: ConfigInput, supervised: bool = False) -> None:
    """Check the configuration, read the data, start the ranks (on Ray, if there are several) and train.

    `supervised`: as in `run_ppo`.
    """
    run_supervised_training(config, SFTConfig, _trainer_class, supervised)


def _trainer_class() -> type:
    from verl.trainer.supervised.sft import SFTTrainer

    return SFTTrainer


if __name__ == "__main__":
    main()
