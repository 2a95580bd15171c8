"""Metrics for MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.tracking.tracker import Generation, Run, Tracker, numbers_in


class MLflow(Tracker):
    """A run of an MLflow experiment."""

    def __init__(self, run: Run) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.experiment)
        mlflow.log_dict(json.loads(json.dumps(run.config, default=str)), "config.json")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        # "@" (val/pass@4) is not allowed in MLflow's metric names.
        found = {key.replace("@", "_at_"): value for key, value in numbers_in(data).items()}
        self._mlflow.log_metrics(found, step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [sample._asdict() for sample in samples]
        self._mlflow.log_text(json.dumps(rows, ensure_ascii=False, default=str), f"val_generations/step_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()
