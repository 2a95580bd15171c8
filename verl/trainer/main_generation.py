"""Answers to the prompts of a file: `python -m verl.trainer.main_generation key=value …`. Run it again to go on.

torch is not imported until the configuration is known to be right.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import GenerationConfig, load_config
from verl.config.command_line import prepared_arguments

logger = logging.getLogger("verl.trainer.main_generation")  # not "__main__", which is outside the one logging setup

_CONFIG_NAME = "generation"


def main() -> None:
    """Compose the command line with Hydra and run; a wrong configuration or wrong data lists every problem, exit 2."""
    with prepared_arguments(_CONFIG_NAME):
        _main()


@hydra.main(config_path="config", config_name=_CONFIG_NAME, version_base=None)
def _main(config: DictConfig) -> None:
    from verl.utils.logging_setup import setup_logging

    setup_logging()
    try:
        run_generation(config)
    except ValueError as error:
        logger.debug("in full:", exc_info=True)
        # The engine's keys have another place in the configuration of a training.
        sys.stderr.write(f"{error}\n".replace("actor_rollout_ref.", ""))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("stopped. What is finished is kept: the same command goes on there.\n")
        sys.exit(130)


def run_generation(config: GenerationConfig | DictConfig | Mapping[str, Any]) -> Path:
    """Check the configuration, generate, and return the file that was written."""
    config = load_config(config, root=GenerationConfig)
    for notice in config.notices:
        logger.warning(notice)

    from verl.trainer.generation import generate_answers

    return generate_answers(config)


if __name__ == "__main__":
    main()
