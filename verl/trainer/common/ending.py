"""How a command ends when it fails: the cause and the remedy in a few lines, last on the screen; the rest in a file.

Wrong input (configuration, data) exits with 2 and needs no traceback. Whatever else ends with 1: the file with the
traceback, what the error says and, for an error of a training step or of a worker, a last line with where it happened
and what the same command does next.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl.config import ConfigError
from verl.trainer.common.own_ray import RayLostError
from verl.trainer.common.signals import StopSignal, stop_signals_raise
from verl.trainer.supervision.causes import place_of, restartable
from verl.trainer.supervision.report import earlier_attempts, is_supervised, tell
from verl.utils.exceptions import RemoteTraceback, annotate_error
from verl.utils.lost_terminal import keep_lost_output
from verl.version import __version__

logger = logging.getLogger("verl.trainer.common.ending")

_MOST_LINES = 16
_FULL_ERRORS = "HYDRA_FULL_ERROR"
_INTERRUPTED = 130


@contextmanager
def ends_in_words(
    wrong_input: tuple[type[Exception], ...] = (),
    reword: Callable[[str], str] = str,
    interrupted: str = "stopped.",
) -> Iterator[None]:
    """Around all that a command does, Hydra included.

    `wrong_input` are errors that exit with 2 besides ConfigError, DataError and Hydra's own; `reword` adapts what is
    said; `interrupted` is said at Ctrl-C.
    """
    before = os.environ.get(_FULL_ERRORS)
    os.environ[_FULL_ERRORS] = "1"  # Hydra hands errors on instead of printing them its own way
    try:
        with stop_signals_raise():
            yield
        tell(leaving=True)
    except KeyboardInterrupt as error:
        stopped = _stopped_by(error) if isinstance(error, StopSignal) else interrupted
        lines = [" ".join(filter(None, (stopped, _sentence(getattr(error, "restart", None)))))]
        _end(lines, error.exit_code if isinstance(error, StopSignal) else _INTERRUPTED, at_once=True)
    except Exception as error:
        text = _wrong_input(error, wrong_input)
        if text is not None:
            logger.debug("in full:", exc_info=True)
            _end(reword(text).splitlines(), 2)
        said = [f"Full traceback in {_write_log(error)}.", *map(reword, _what(error)), *_where(error)]
        again = _is_restartable(error)
        at_once = again or isinstance(error, RayLostError) or getattr(error, "at_once", False)
        _end(said, 1, at_once, said_by_supervisor=again)
    finally:
        if before is None:
            os.environ.pop(_FULL_ERRORS, None)
        else:
            os.environ[_FULL_ERRORS] = before


@contextmanager
def tells_of_restart(trainer: Any) -> Iterator[None]:
    """Errors that leave this block know the run's folder and what the same command would do; supervisors hear it."""
    from verl.utils.fs import expand_path

    folder = expand_path(trainer.default_local_dir)
    keep_lost_output(os.path.join(folder, "after_the_terminal.log"))
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        annotate_error(error, run_folder=folder, restart=what_the_same_command_does(trainer))
        place = place_of(error)
        first_sentence = _what(error)[0].partition(". ")[0].rstrip(".")
        cause = f"{first_sentence} ({place})" if place else first_sentence
        step = getattr(error, "step", None)
        tell(ending={"cause": cause, "restartable": _is_restartable(error), "place": place, "step": step})
        raise
    finally:
        tell(ending={"cause": None, "restartable": False, "place": None})  # unless one was told


def what_the_same_command_does(trainer: Any) -> str:
    """For the `trainer` block of a run, in one clause. Sizes are looked at, not checksums: loading does that."""
    if trainer.resume_mode == "disable":
        return "the same command starts from the beginning (trainer.resume_mode=disable)"
    folder = _resumed_from(trainer)
    if folder is None:
        return "the same command starts from the beginning: no step was saved"
    step = folder.name.rpartition("_")[2]
    return f"the same command goes on at step {step} ({folder})"


def _resumed_from(trainer: Any) -> Path | None:
    from verl.utils.checkpoint.steps import has_expected_sizes, newest_first
    from verl.utils.fs import expand_path

    if trainer.resume_mode == "resume_path":
        return Path(str(trainer.resume_from_path))
    found = newest_first(Path(expand_path(trainer.default_local_dir)).absolute())
    return next(filter(has_expected_sizes, found), None)


def _stopped_by(signal: StopSignal) -> str:
    return f"stopped by {signal.by}{' before the first step' if signal.before_first_step else ''}."


def _is_restartable(error: BaseException) -> bool:
    return is_supervised() and restartable(error, again=earlier_attempts() > 0)


def _end(lines: list[str], code: int, at_once: bool = False, said_by_supervisor: bool = False) -> None:
    """Say it and exit. `at_once`: without waiting for Ray, which may be gone, and for threads.

    `said_by_supervisor`: only if it does not start the run again.
    """
    tell(leaving=True)
    if said_by_supervisor:
        tell(lines=lines)
    ray = sys.modules.get("ray")
    if not at_once and ray is not None and ray.is_initialized():
        ray.shutdown()  # what dying workers print arrives at any time until then
    sys.stdout.flush()
    if not said_by_supervisor:
        sys.stderr.write("\n".join([*lines, ""]))
        sys.stderr.flush()
    if at_once:
        os._exit(code)
    sys.exit(code)


def _wrong_input(error: Exception, more: tuple[type[Exception], ...]) -> str | None:
    """What to say of an error in what the user wrote; None for any other."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, yaml.MarkedYAMLError):
        return _yaml_problem(error)
    data_error = _loaded("verl.utils.dataset.problems", "DataError")
    known = (ConfigError, HydraException, OmegaConfBaseException, *data_error, *more)
    return str(error) if isinstance(error, known) else None


def _yaml_problem(error: Any) -> str:
    """File, line and what is wrong there, with the line itself."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"1 problem in the configuration:\n1. {error}"
    said = ", ".join(filter(None, (error.context, error.problem)))
    lines = [
        "1 problem in the configuration:",
        f"1. {mark.name}, line {mark.line + 1}, column {mark.column + 1}: {said}. Correct it there or just above.",
    ]
    with suppress(OSError, IndexError):
        lines.append(f"   {Path(mark.name).read_text().splitlines()[mark.line]}")
        lines.append(f"   {' ' * mark.column}^")
    return "\n".join(lines)


def _what(error: BaseException) -> list[str]:
    """The message of the error that says most: a worker's own rather than that of the call that brought it."""
    summary = getattr(error, "summary", None)  # a WorkerError, whose message holds a traceback
    if summary is not None:
        cause = error.__cause__
        return _cut(summary) if cause is None or isinstance(cause, RemoteTraceback) else _what(cause)
    text = str(error).strip()
    anticipated = type(error) is ValueError or type(error).__module__.partition(".")[0] == "verl"
    if not anticipated or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return _cut(text)


def _cut(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "…"]


def _where(error: BaseException) -> list[str]:
    """A line with where it happened and what the same command does; none where there is nothing to say."""
    role, rank, host = (getattr(error, name, None) for name in ("role", "rank", "host"))
    phase, step, method = (getattr(error, name, None) for name in ("phase", "step", "method"))
    where = []
    if role is not None:
        where += [f"role {role}", f"rank {rank}", f"host {host}"]
    if phase is not None:
        where.append(f"phase {phase} of step {step}")
    elif method is not None:
        where.append(f"while starting ({method})")
    # Before the first step the same command would only end the same way; a process that died is another matter.
    died = isinstance(error, (RayLostError, *_loaded("verl.single_controller.base.errors", "WorkerDiedError")))
    restart = getattr(error, "restart", None) if phase is not None or died else None
    line = " ".join(filter(None, (_sentence(", ".join(where)), _sentence(restart))))
    return [line] if line else []


def _loaded(module: str, name: str) -> tuple[type[BaseException], ...]:
    """The class, if its module is loaded: else no error is of it, and there is no need to load torch now."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _sentence(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _write_log(error: Exception) -> str:
    """The traceback with all causes, in the run's folder or, before that was made, among temporary files."""
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    head = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {platform.node()}, verl {__version__}",
        f"command: {' '.join(sys.argv)}",
        "",
    ]
    text = "\n".join(head) + "".join(traceback.format_exception(type(error), error, error.__traceback__))
    for folder in filter(None, (getattr(error, "run_folder", None), tempfile.gettempdir())):
        with suppress(OSError):
            place = os.path.join(folder, name)
            Path(place).write_text(text)
            return place
    return "no file: none could be written"
