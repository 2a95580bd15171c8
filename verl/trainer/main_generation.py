"""Answers to the prompts of a file: `python -m verl.trainer.main_generation key=value …`. Run it again to go on.

torch is not imported until the configuration is known to be right.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from verl.config import GenerationConfig
from verl.config.load import Given
from verl.trainer.common.command_line import checked, command
from verl.trainer.common.preflight import generation_preflight


@command(
    "generation",
    wrong_input=(ValueError,),
    # The engine's keys have another place in the configuration of a training.
    reword=lambda text: text.replace("actor_rollout_ref.", ""),
    interrupted="stopped. What is finished is kept: the same command goes on there.",
)
def main(config: DictConfig) -> None:
    """Answer the prompts of a file."""
    run_generation(config)


def run_generation(config: Given) -> Path:
    """Check the configuration, generate, and return the file that was written."""
    config = checked(config, GenerationConfig, preflight=generation_preflight)

    from verl.trainer.generation import generate_answers

    return generate_answers(config)


if __name__ == "__main__":
    main()
