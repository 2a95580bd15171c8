"""The table of trackers: what each needs, and how it is opened. Nothing is imported until it is asked for."""

from __future__ import annotations

import importlib
import json
import netrc
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlparse


class Run(NamedTuple):
    """What a tracker is told about the run."""

    project: str
    experiment: str
    config: Mapping[str, Any]
    first_step: int | None = None
    """The first step it will log: records from there on are of steps done again, or of another run. None: unknown."""

    @property
    def directory(self) -> Path:
        """Where local backends write: `tensorboard --logdir ./runs/` finds every run."""
        return Path("runs") / self.project / self.experiment


class Sample(NamedTuple):
    """One validation sample."""

    input: str
    output: str
    score: Any


class Backend(Protocol):
    """One open tracker. Values of `data` are plain Python; what a tracker cannot show it leaves out."""

    def log(self, data: Mapping[str, Any], step: int) -> None: ...

    def log_generations(self, samples: Sequence[Sample], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BackendEntry:
    """How to open a tracker, the package it needs (and its pip name), and a check that raises before training."""

    open: Callable[[Run], Backend]
    package: str | None = None
    pip: str | None = None
    check: Callable[[], None] = field(default=lambda: None)
    folder: Callable[[Run], Path | None] = field(default=lambda run: None)
    """Where on this machine it writes, if it does."""


def _open_console(run: Run) -> Backend:
    from verl.utils.tracking.console import ConsoleBackend

    return ConsoleBackend()


def _open_file(run: Run) -> Backend:
    from verl.utils.tracking.file import FileBackend

    return FileBackend(run.directory, run.config, run.first_step)


class _TensorBoard:
    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.directory), purge_step=run.first_step)
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2, default=str)}\n```")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in _numbers(data).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        for index, sample in enumerate(samples):
            text = f"score {sample.score}\n\n```\n{sample.input}\n```\n\n```\n{sample.output}\n```"
            self._writer.add_text(f"val/generations/{index}", text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """Trackers of the form init(project, name, config) → log(dict, step) → finish()."""

    def __init__(self, package: str, run: Run, table: Callable[[Any, Sequence[Sample]], Any]) -> None:
        self._module = importlib.import_module(package)
        self._table = table
        more = _wandb_resume(run) if package == "wandb" else {}
        self._module.init(project=run.project, name=run.experiment, config=dict(run.config), **more)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._module.log(_numbers(data), step=step)

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        if samples:
            self._module.log({"val/generations": self._table(self._module, samples)}, step=step)

    def close(self) -> None:
        self._module.finish()


class _MLflow:
    def __init__(self, run: Run) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.experiment)
        mlflow.log_dict(json.loads(json.dumps(run.config, default=str)), "config.json")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        # "@" (val/pass@4) is not allowed in MLflow's metric names.
        self._mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in _numbers(data).items()}, step=step)

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        rows = [sample._asdict() for sample in samples]
        self._mlflow.log_text(json.dumps(rows, ensure_ascii=False, default=str), f"val_generations/step_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()


def _wandb_resume(run: Run) -> dict[str, Any]:
    """The id of the run to go on with, kept beside its other records; a run that begins anew gets a new one.

    wandb takes no second value for a step it has: steps that are done again keep their first.
    """
    if run.first_step is None:
        return {}
    file = run.directory / "wandb_id"
    if run.first_step == 0 or not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12])
    return {"id": file.read_text().strip(), "resume": "allow"}


def _wandb_folder(run: Run) -> Path | None:
    disabled = os.environ.get("WANDB_MODE", "").lower() == "disabled"
    return None if disabled else Path(os.environ.get("WANDB_DIR", "."), "wandb")


def _check_wandb_login() -> None:
    if os.environ.get("WANDB_MODE", "").lower() in ("offline", "dryrun", "disabled"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    import wandb

    # Asked of wandb: the default server has changed between its versions.
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


def _wandb_table(wandb: Any, samples: Sequence[Sample]) -> Any:
    return wandb.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])


def _swanlab_table(swanlab: Any, samples: Sequence[Sample]) -> Any:
    return [swanlab.Text(f"{sample.input}\n---\n{sample.output}\n--- score {sample.score}") for sample in samples]


def _trackio_table(trackio: Any, samples: Sequence[Sample]) -> Any:
    import pandas

    return trackio.Table(dataframe=pandas.DataFrame([sample._asdict() for sample in samples]))


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in data.items() if isinstance(value, int | float)}


BACKENDS: dict[str, BackendEntry] = {
    "console": BackendEntry(_open_console),
    "file": BackendEntry(_open_file, folder=lambda run: run.directory),
    "tensorboard": BackendEntry(_TensorBoard, package="tensorboard", folder=lambda run: run.directory),
    "wandb": BackendEntry(
        lambda run: _Hosted("wandb", run, _wandb_table),
        package="wandb",
        check=_check_wandb_login,
        folder=_wandb_folder,
    ),
    "mlflow": BackendEntry(_MLflow, package="mlflow"),
    "swanlab": BackendEntry(lambda run: _Hosted("swanlab", run, _swanlab_table), package="swanlab"),
    "trackio": BackendEntry(lambda run: _Hosted("trackio", run, _trackio_table), package="trackio"),
}
