"""Scores of generated answers: `python -m verl.trainer.main_eval data.path=answers.parquet`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import EvalConfig, load_config
from verl.config.command_line import prepared_arguments
from verl.trainer.common.ending import ends_in_words

logger = logging.getLogger("verl.trainer.main_eval")  # not "__main__", which is outside the one logging setup

_CONFIG_NAME = "evaluation"


def main() -> None:
    """Compose the command line with Hydra and run; a wrong configuration or wrong data lists every problem, exit 2."""
    with ends_in_words((ValueError,)), prepared_arguments(_CONFIG_NAME):
        _main()


@hydra.main(config_path="config", config_name=_CONFIG_NAME, version_base=None)
def _main(config: DictConfig) -> None:
    from verl.utils.logging_setup import setup_logging

    setup_logging()
    with ends_in_words((ValueError,)):  # before Hydra says something of its own
        run_eval(config)


def run_eval(config: EvalConfig | DictConfig | Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Check the configuration, score, show a table; returns data source → variable → metric."""
    config = load_config(config, root=EvalConfig)
    for notice in config.notices:
        logger.warning(notice)

    from rich.console import Console

    from verl.trainer.evaluation import evaluate, show

    metrics = evaluate(config)
    show(metrics, Console())
    return metrics


if __name__ == "__main__":
    main()
