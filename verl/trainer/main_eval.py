"""Scores of generated answers: `python -m verl.trainer.main_eval data.path=answers.parquet`."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import EvalConfig
from verl.config.load import Given
from verl.trainer.common.command_line import checked, command


@command("evaluation", wrong_input=(ValueError,))
def main(config: DictConfig) -> None:
    """Score the answers of a file."""
    run_eval(config)


def run_eval(config: Given) -> dict[str, dict[str, dict[str, float]]]:
    """Check the configuration, score, show a table; returns data source → variable → metric."""
    config = checked(config, EvalConfig)

    from rich.console import Console

    from verl.trainer.evaluation import evaluate, show

    metrics = evaluate(config)
    show(metrics, Console())
    return metrics


if __name__ == "__main__":
    main()
