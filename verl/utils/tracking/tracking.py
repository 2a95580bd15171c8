"""One `log(data, step)` for any number of trackers, all of them checked before training starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.config.names import LOGGERS
from verl.config.problems import closest
from verl.utils.progress import pulsing
from verl.utils.registry import Registry
from verl.utils.tracking.console import Console
from verl.utils.tracking.tracker import Generation, Run, Tracker

logger = logging.getLogger(__name__)

# A service that is away keeps its client waiting for ever: then the run is given up as any that hangs.
_CLOSING_S = 1200.0

# Metrics that every tracker except the console also gets under a short name.
SHORT_NAMES = {
    "reward/mean": "reward_mean",
    "actor/loss": "actor_loss",
    "critic/loss": "critic_loss",
    "kl/mean": "kl_divergence",
    "actor/ppo_ratio": "ppo_ratio",
    "actor/grad_norm": "grad_norm",
}

TRACKERS: Registry[type[Tracker]] = Registry("trainer.logger", LOGGERS)


class Tracking:
    """Sends metrics to every backend asked for.

    `default_backend`: one name or several of console, file, tensorboard, wandb, mlflow, swanlab, trackio. `config` (a
    dataclass, DictConfig or dict) is stored with the run where the backend can. A backend that fails while training
    runs (a full disk, a tracker's server) costs its own record: a warning, counted in `failures`, never the run.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Any = None,
        first_step: int | None = None,
        tracking_dir: str | None = None,
    ) -> None:
        """`tracking_dir`: the folder of local backends (default: ./runs/<project_name>/<experiment_name>).

        `first_step`: the first step that will be logged, where the run knows it: 0 of a new one, N + 1 of a run
        resumed from step N. Records from there on, of steps that are done again, are superseded where a backend can."""
        names = check_backends(default_backend)
        run = Run(project_name, experiment_name, _plain_config(config), first_step, tracking_dir)
        self.failures: Counter[str] = Counter()
        self._backends: dict[str, Tracker] = {name: TRACKERS[name](run) for name in names}

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record one step's metrics: name → number (Python, numpy or a one-element tensor).

        Trackers other than the console get those of `SHORT_NAMES` under both names.
        """
        plain = {key: _plain_value(value) for key, value in data.items()}
        both = {short: plain[key] for key, short in SHORT_NAMES.items() if key in plain} | plain
        self._each(lambda backend: backend.log(plain if isinstance(backend, Console) else both, int(step)))

    def log_generations(self, samples: Iterable[Sequence[Any]], step: int, on_console: int | None = None) -> None:
        """Record validation samples, (input, output, score) each; a console shows the first `on_console` of them."""
        rows = [Generation(str(given), str(answer), _plain_value(score)) for given, answer, score in samples]
        few = rows[:on_console]
        self._each(lambda backend: backend.log_generations(few if isinstance(backend, Console) else rows, int(step)))

    def close(self) -> None:
        """Finish every backend; safe to call twice."""
        while self._backends:
            name, backend = self._backends.popitem()
            try:
                with pulsing(_CLOSING_S):  # what is left is sent now
                    backend.close()
            except Exception as error:  # noqa: BLE001 - said; a tracker must not end a training run
                logger.warning("tracking: %s did not close: %r", name, error)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _each(self, record: Callable[[Tracker], None]) -> None:
        for name, backend in self._backends.items():
            try:
                record(backend)
            except Exception as error:  # noqa: BLE001 - counted and said; a tracker must not end a training run
                self.failures[name] += 1
                logger.warning("tracking: %s did not take a record (failure %d): %r", name, self.failures[name], error)


class ValidationGenerationsLogger:
    """Shows validation samples in the trackers: `log(loggers, samples, step)`.

    `loggers` is the run's `Tracking`, or backend names, which are then opened once under the given names.
    """

    def __init__(self, project_name: str = "verl", experiment_name: str = "validation") -> None:
        self._names = (project_name, experiment_name)
        self._own: dict[tuple[str, ...], Tracking] = {}

    def log(self, loggers: Tracking | str | Sequence[str], samples: Iterable[Sequence[Any]], step: int) -> None:
        """Record samples of (input, output, score)."""
        if not isinstance(loggers, Tracking):
            names = tuple(_as_names(loggers))
            if names not in self._own:
                self._own[names] = Tracking(*self._names, default_backend=names)
            loggers = self._own[names]
        loggers.log_generations(samples, step)

    def close(self) -> None:
        """Close what was opened here; a `Tracking` that was passed in stays open."""
        while self._own:
            self._own.popitem()[1].close()


def check_backends(default_backend: str | Sequence[str]) -> list[str]:
    """The backend names, each once, or a ValueError: unknown, not installed, not logged in. Opens nothing."""
    names = list(dict.fromkeys(_as_names(default_backend)))
    for name in names:
        if name not in LOGGERS:
            near = closest(name, LOGGERS)
            hint = f"Did you mean {near!r}? " if near else ""
            raise ValueError(f"trainer.logger: unknown backend {name!r}. {hint}Known: {', '.join(LOGGERS)}.")
        package = LOGGERS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"trainer.logger: {name!r} needs the package {package!r}, which is not installed. "
                f"Run: pip install {package}"
            )
        TRACKERS[name].check()
    return names


def tracking_problems(default_backend: str | Sequence[str]) -> list[str]:
    """What `check_backends` would raise, of every backend."""
    found = []
    for name in dict.fromkeys(_as_names(default_backend)):
        try:
            check_backends(name)
        except ValueError as error:
            found.append(str(error).removeprefix("trainer.logger: ").rstrip("."))
    return found


def tracking_folders(trainer_config: Any) -> list[Path]:
    """The folders on this machine that the trackers of a run write to."""
    trainer = trainer_config
    run = Run(trainer.project_name, trainer.experiment_name, {}, tracking_dir=trainer.tracking_dir)
    names = [name for name in dict.fromkeys(_as_names(trainer_config.logger)) if name in LOGGERS]
    return [folder for name in names if (folder := TRACKERS[name].folder(run)) is not None]


def _as_names(default_backend: str | Sequence[str]) -> list[str]:
    return [default_backend] if isinstance(default_backend, str) else [str(name) for name in default_backend]


def _plain_value(value: Any) -> Any:
    """numpy and torch values as Python numbers; one-element arrays count as numbers."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain


def _plain_config(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values, whatever it came as."""
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return dict(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    return dict(config)
