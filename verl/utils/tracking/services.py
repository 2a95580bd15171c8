"""Trackers of services and their local servers: Weights & Biases, SwanLab, Trackio and MLflow."""

from __future__ import annotations

import importlib
import json
import netrc
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from verl.utils.tracking import Generation, TrackedRun, Tracker, numbers_in, register_tracker


class _HostedTracker(Tracker):
    """Base of trackers whose package has the functions init(project, name, config), log(dict, step) and finish()."""

    package: str

    def __init__(self, run: TrackedRun) -> None:
        self.module = importlib.import_module(self.package)
        self.module.init(
            project=run.project, name=run.experiment, config=dict(run.config), **self.resume_arguments(run)
        )

    def resume_arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Return the arguments of `init` that continue an earlier run."""
        return {}

    def table(self, samples: Sequence[Generation]) -> Any:
        """Return generations in a form that the tracker shows."""
        raise NotImplementedError

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.module.log(numbers_in(data), step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        if samples:
            self.module.log({"val/generations": self.table(samples)}, step=step)

    def close(self) -> None:
        self.module.finish()


@register_tracker("wandb", package="wandb")
class Wandb(_HostedTracker):
    """Weights & Biases; a restarted run continues its record."""

    package = "wandb"

    def resume_arguments(self, run: TrackedRun) -> dict[str, Any]:
        """The id of the run, stored beside its other records.

        A new run gets a new id, except if the same command (VERL_RUN) is restarted before its first checkpoint. wandb
        accepts no second value for a step: repeated steps keep their first.
        """
        if run.first_step is None:
            return {}
        file = run.directory / "wandb_id"
        if run.first_step == 0 or not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(os.environ.get("VERL_RUN") or uuid.uuid4().hex[:12])
        return {"id": file.read_text().strip(), "resume": "allow"}

    def table(self, samples: Sequence[Generation]) -> Any:
        return self.module.Table(columns=list(Generation._fields), data=[list(sample) for sample in samples])

    @classmethod
    def folder(cls, run: TrackedRun) -> Path | None:
        disabled = os.environ.get("WANDB_MODE", "").lower() == "disabled"
        return None if disabled else Path(os.environ.get("WANDB_DIR", "."), "wandb")

    @classmethod
    def check(cls) -> None:
        if os.environ.get("WANDB_MODE", "").lower() in ("offline", "dryrun", "disabled"):
            return
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return
        import wandb

        # From wandb itself: the default server has changed between its versions.
        host = urlparse(wandb.Settings().base_url).hostname or ""
        home = Path.home()
        for file in (os.environ.get("NETRC"), home / ".netrc", home / "_netrc"):
            try:
                if file and netrc.netrc(str(file)).authenticators(host):
                    return
            except (OSError, netrc.NetrcParseError):
                continue
        raise ValueError(
            f"trainer.logger: 'wandb' is not logged in to {host}. "
            "Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline."
        )


@register_tracker("swanlab", package="swanlab")
class SwanLab(_HostedTracker):
    """SwanLab; generations as texts."""

    package = "swanlab"

    def table(self, samples: Sequence[Generation]) -> Any:
        return [
            self.module.Text(f"{sample.input}\n---\n{sample.output}\n--- score {sample.score}") for sample in samples
        ]


@register_tracker("trackio", package="trackio")
class Trackio(_HostedTracker):
    """Trackio; generations as a table."""

    package = "trackio"

    def table(self, samples: Sequence[Generation]) -> Any:
        import pandas

        return self.module.Table(dataframe=pandas.DataFrame([sample._asdict() for sample in samples]))


@register_tracker("mlflow", package="mlflow")
class MLflow(Tracker):
    """A run of an MLflow experiment."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.experiment)
        mlflow.log_dict(json.loads(json.dumps(run.config, default=str)), "config.json")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        # "@" (val/pass@4) is not allowed in MLflow's metric names.
        metrics = {key.replace("@", "_at_"): value for key, value in numbers_in(data).items()}
        self._mlflow.log_metrics(metrics, step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [sample._asdict() for sample in samples]
        self._mlflow.log_text(json.dumps(rows, ensure_ascii=False, default=str), f"val_generations/step_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()
