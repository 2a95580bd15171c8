"""Generate responses to the prompts of a file: `python -m verl.trainer.main_generation key=value …`.

The same command resumes an interrupted run. torch is not imported before the configuration has been validated.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from verl.config import GenerationConfig
from verl.config.load import ConfigInput
from verl.trainer.common.command_line import command, validated_config
from verl.trainer.common.preflight import generation_preflight
from verl.utils.console import LINE, show_startup, startup_phase


@command(
    "generation",
    invalid_input=(ValueError,),
    # Messages name the keys of a training run, where `rollout` and `model` are in the block `actor_rollout_ref`.
    reword=lambda text: text.replace("actor_rollout_ref.", ""),
    interrupted="stopped. Finished batches are kept: the same command resumes there.",
)
def main(config: DictConfig) -> None:
    """Generate responses to the prompts of a file."""
    run_generation(config)


def run_generation(config: ConfigInput) -> Path:
    """Check the configuration, generate, and return the output file."""
    config = validated_config(config, GenerationConfig, preflight=generation_preflight)

    with show_startup(config.trainer.console == LINE), startup_phase("imports"):
        from verl.trainer.generation import generate_responses

    return generate_responses(config)


if __name__ == "__main__":
    main()
