"""Score generated responses: `python -m verl.trainer.main_eval data.path=answers.parquet`."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import EvalConfig
from verl.config.load import ConfigInput
from verl.trainer.common.command_line import command, validated_config


@command("evaluation", invalid_input=(ValueError,))
def main(config: DictConfig) -> None:
    """Score the responses of a file."""
    run_eval(config)


def run_eval(config: ConfigInput) -> dict[str, dict[str, dict[str, float]]]:
    """Check the configuration, score, print a table; return data source → variable → metric."""
    config = validated_config(config, EvalConfig)

    from rich.console import Console

    from verl.trainer.evaluation import evaluate, show_metrics

    metrics = evaluate(config)
    show_metrics(metrics, Console())
    return metrics


if __name__ == "__main__":
    main()
