"""Answers to the prompts of a file: `python -m verl.trainer.main_generation key=value …`. Run it again to go on.

torch is not imported until the configuration is known to be right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import GenerationConfig, load_config
from verl.config.command_line import prepared_arguments
from verl.trainer.common.ending import ends_in_words

logger = logging.getLogger("verl.trainer.main_generation")  # not "__main__", which is outside the one logging setup

_CONFIG_NAME = "generation"


def main() -> None:
    """Compose the command line with Hydra and run; a wrong configuration or wrong data lists every problem, exit 2."""
    with _ends_in_words(), prepared_arguments(_CONFIG_NAME):
        _main()


@hydra.main(config_path="config", config_name=_CONFIG_NAME, version_base=None)
def _main(config: DictConfig) -> None:
    from verl.utils.logging_setup import setup_logging

    setup_logging()
    with _ends_in_words():  # before Hydra says something of its own
        run_generation(config)


def run_generation(config: GenerationConfig | DictConfig | Mapping[str, Any]) -> Path:
    """Check the configuration, generate, and return the file that was written."""
    config = load_config(config, root=GenerationConfig)
    for notice in config.notices:
        logger.warning(notice)

    from verl.trainer.generation import generate_answers

    return generate_answers(config)


def _ends_in_words() -> AbstractContextManager[None]:
    kept = "stopped. What is finished is kept: the same command goes on there."
    # The engine's keys have another place in the configuration of a training.
    return ends_in_words((ValueError,), lambda text: text.replace("actor_rollout_ref.", ""), interrupted=kept)


if __name__ == "__main__":
    main()
