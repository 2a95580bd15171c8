"""Tracking: one `log(data, step)` for any number of trackers, all of them checked before training starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from verl.config.names import TRACKERS as TRACKER_TRAITS
from verl.config.names import tracker_package
from verl.config.problems import closest
from verl.utils.console import FULL
from verl.utils.progress import pulsing
from verl.utils.py_functional import mask_secrets
from verl.utils.registry import Registry

logger = logging.getLogger(__name__)

# The client of an unreachable service may wait forever: after this time the run counts as hanging.
_CLOSE_TIMEOUT_S = 1200.0

# Metrics that every tracker except the console also gets under a short name.
SHORT_NAMES = {
    "reward/mean": "reward_mean",
    "actor/loss": "actor_loss",
    "critic/loss": "critic_loss",
    "kl/mean": "kl_divergence",
    "actor/ppo_ratio": "ppo_ratio",
    "actor/grad_norm": "grad_norm",
}


class TrackedRun(NamedTuple):
    """The run that a tracker records."""

    project: str
    experiment: str
    config: Mapping[str, Any]
    first_step: int | None = None
    """The first step it will log: existing records from there on are of repeated steps, or of another run. None:
    unknown."""

    tracking_dir: str | None = None
    """`trainer.tracking_dir`; None: ./runs/<project>/<experiment>."""

    console: str = FULL
    """`trainer.console`."""

    total_steps: int | None = None
    """The last step of the run; None: unknown."""

    @property
    def directory(self) -> Path:
        """The folder of local trackers. By default `tensorboard --logdir ./runs/` shows every run."""
        return Path("runs") / self.project / self.experiment if self.tracking_dir is None else Path(self.tracking_dir)


class Generation(NamedTuple):
    """One response to a validation prompt."""

    input: str
    output: str
    score: Any


class Tracker:
    """Base class of trackers. Values of `data` are plain Python; a tracker ignores those it cannot show.

    Your own tracker is a module listed in `external_libs`:

        @register_tracker("mine", package="my_service")  # the package is optional
        class MyTracker(Tracker):
            def __init__(self, run: TrackedRun) -> None: ...
            def log(self, data: Mapping[str, Any], step: int) -> None: ...
            def log_generations(self, samples: Sequence[Generation], step: int) -> None: ...
            def close(self) -> None: ...
    """

    on_console: ClassVar[bool] = False
    """Whether a person reads the output at a terminal: the tracker gets no short names, and only a few generations."""

    def __init__(self, run: TrackedRun) -> None:
        raise NotImplementedError

    def log(self, data: Mapping[str, Any], step: int) -> None:
        raise NotImplementedError

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @classmethod
    def check(cls) -> None:
        """Raise ValueError if the tracker cannot be opened. Called before training."""

    @classmethod
    def folder(cls, run: TrackedRun) -> Path | None:
        """Return the folder on this machine that it writes to; None: it writes to none."""
        return None


TRACKERS: Registry[type[Tracker]] = Registry("trainer.logger", TRACKER_TRAITS)
register_tracker = TRACKERS.register


class Tracking:
    """Sends metrics to all chosen trackers.

    `default_backend`: one or several of console, file, tensorboard, wandb, mlflow, swanlab, trackio. `config` (a
    dataclass, DictConfig or dict) is stored with the run by trackers that support it. A tracker that fails during
    training (a full disk, an unreachable server) loses the record, which is logged and counted in `failures`; the run
    continues.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Any = None,
        first_step: int | None = None,
        tracking_dir: str | None = None,
        console: str = FULL,
        total_steps: int | None = None,
    ) -> None:
        """`tracking_dir`: the folder of local trackers (default: ./runs/<project_name>/<experiment_name>).

        `console`: `line` (one line per step) or `full`. `total_steps`: the last step, for the remaining time.

        `first_step`: the first step that will be logged, if known: 0 of a new run, N + 1 of one resumed from step N.
        Trackers that support it replace existing records from that step on.
        """
        names = check_backends(default_backend)
        run = TrackedRun(
            project_name,
            experiment_name,
            mask_secrets(_plain_config(config)),
            first_step,
            tracking_dir,
            console,
            total_steps,
        )
        self.failures: Counter[str] = Counter()
        self._trackers: dict[str, Tracker] = {}
        try:
            for name in names:
                self._trackers[name] = TRACKERS[name](run)
        except BaseException:
            self.close()
            raise

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record one step's metrics: name → number (Python, numpy or a one-element tensor).

        Trackers other than the console get those of `SHORT_NAMES` under both names.
        """
        plain = {key: _plain_value(value) for key, value in data.items()}
        with_short_names = {short: plain[key] for key, short in SHORT_NAMES.items() if key in plain} | plain
        self._for_each(lambda tracker: tracker.log(plain if tracker.on_console else with_short_names, int(step)))

    def log_generations(self, samples: Iterable[Sequence[Any]], step: int, on_console: int | None = None) -> None:
        """Record validation samples, (input, output, score) each; a console shows the first `on_console` of them."""
        rows = [Generation(str(prompt), str(response), _plain_value(score)) for prompt, response, score in samples]
        console_rows = rows[:on_console]
        self._for_each(lambda tracker: tracker.log_generations(console_rows if tracker.on_console else rows, int(step)))

    def close(self) -> None:
        """Close every tracker; safe to call twice."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                with pulsing(_CLOSE_TIMEOUT_S):  # pending records are sent now
                    tracker.close()
            except Exception as error:  # noqa: BLE001 - logged; a tracker must not end a training run
                logger.warning("tracking: closing %s failed: %r", name, error)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _for_each(self, record: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                record(tracker)
            except Exception as error:  # noqa: BLE001 - counted and logged; a tracker must not end a training run
                self.failures[name] += 1
                logger.warning("tracking: %s lost a record (failure %d): %r", name, self.failures[name], error)


class ValidationGenerationsLogger:
    """Shows validation samples in the trackers: `log(loggers, samples, step)`.

    `loggers` is the run's `Tracking`, or names of trackers, which are then opened once under the given names.
    """

    def __init__(self, project_name: str = "verl", experiment_name: str = "validation") -> None:
        self._names = (project_name, experiment_name)
        self._opened: dict[tuple[str, ...], Tracking] = {}

    def log(self, loggers: Tracking | str | Sequence[str], samples: Iterable[Sequence[Any]], step: int) -> None:
        """Record samples of (input, output, score)."""
        if not isinstance(loggers, Tracking):
            names = tuple(_as_names(loggers))
            if names not in self._opened:
                self._opened[names] = Tracking(*self._names, default_backend=names)
            loggers = self._opened[names]
        loggers.log_generations(samples, step)

    def close(self) -> None:
        """Close the trackers opened here; a `Tracking` that was passed in stays open."""
        while self._opened:
            self._opened.popitem()[1].close()


def check_backends(default_backend: str | Sequence[str]) -> list[str]:
    """Return the names of the trackers, each once. ValueError: unknown, not installed or not logged in.

    Opens no tracker.
    """
    names = list(dict.fromkeys(_as_names(default_backend)))
    for name in names:
        if name not in TRACKERS:
            near = closest(name, TRACKERS)
            hint = f"Did you mean {near!r}? " if near else ""
            raise ValueError(f"trainer.logger: unknown backend {name!r}. {hint}Known: {', '.join(TRACKERS)}.")
        package = tracker_package(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"trainer.logger: {name!r} needs the package {package!r}, which is not installed. "
                f"Run: pip install {package}"
            )
        TRACKERS[name].check()
    return names


def tracking_problems(default_backend: str | Sequence[str]) -> list[str]:
    """Return the error messages of `check_backends` for all trackers."""
    problems = []
    for name in dict.fromkeys(_as_names(default_backend)):
        try:
            check_backends(name)
        except ValueError as error:
            problems.append(str(error).removeprefix("trainer.logger: ").rstrip("."))
    return problems


def tracking_folders(trainer_config: Any) -> list[Path]:
    """Return the folders on this machine that the trackers of a run write to."""
    run = TrackedRun(
        trainer_config.project_name, trainer_config.experiment_name, {}, tracking_dir=trainer_config.tracking_dir
    )
    names = [name for name in dict.fromkeys(_as_names(trainer_config.logger)) if name in TRACKERS]
    return [folder for name in names if (folder := TRACKERS[name].folder(run)) is not None]


def numbers_in(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of `data` that are numbers."""
    return {key: value for key, value in data.items() if isinstance(value, int | float)}


def _as_names(default_backend: str | Sequence[str]) -> list[str]:
    return [default_backend] if isinstance(default_backend, str) else [str(name) for name in default_backend]


def _plain_value(value: Any) -> Any:
    """numpy and torch values as Python numbers; one-element arrays count as numbers."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain


def _plain_config(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values."""
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return dict(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    return dict(config)
