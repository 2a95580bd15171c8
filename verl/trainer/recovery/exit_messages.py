"""The last lines of a command: the location of the model, or cause and remedy of an error.

Invalid input (configuration, data) exits with 2 and without a traceback. Other errors exit with 1 and print the file
with the traceback, the message of the error and, for an error of a training step or a worker, its location and the step
at which the same command would resume.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl.config import ConfigError
from verl.trainer.recovery.ray_monitor import RayLostError
from verl.trainer.recovery.signals import StopSignal, stop_signals_raise
from verl.trainer.recovery.supervised_process import is_supervised, previous_attempts, report_to_supervisor
from verl.utils.checkpoint.folders import has_expected_sizes, newest_first, step_of
from verl.utils.exceptions import RemoteTraceback, annotate_error, cause_chain
from verl.utils.fs import expand_path
from verl.utils.logging_setup import set_fallback_file
from verl.utils.py_functional import mask_arguments
from verl.version import __version__

logger = logging.getLogger(__name__)

# Maximum number of lines of an error's message.
_MAX_LINES = 16
_FULL_ERRORS = "HYDRA_FULL_ERROR"
# Exit code after Ctrl-C: 128 + SIGINT.
_INTERRUPTED = 130

# Class names of errors after which a restart may help. Names, because their modules import torch or Ray. The suffix
# ":ray" restricts a name to Ray's class: torch has an OutOfMemoryError, too, which would occur again.
_RESTARTABLE = frozenset(
    {
        # Of verl: a process is gone or hangs.
        "WorkerDiedError",
        "HangError",
        "RayLostError",
        # Of Ray: a process, a node or a stored object is gone.
        "ActorDiedError",
        "ActorUnavailableError",
        "ActorUnschedulableError",
        "LocalRayletDiedError",
        "NodeDiedError",
        "ObjectFetchTimedOutError",
        "ObjectLostError",
        "ObjectReconstructionFailedError",
        "OwnerDiedError",
        "OutOfMemoryError:ray",
        "RaySystemError",
        "RpcError",
        "WorkerCrashedError",
        # Of torch: a peer, or the network to it, is gone.
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    }
)
# Restartable except at the first attempt: Ray processes of an earlier attempt may still be exiting.
_RESTARTABLE_LATER = frozenset({"RayUnavailableError"})
# Messages of plain RuntimeErrors that a worker raises when a peer, the network or a device is lost.
_LOST_PEER = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|[Ss]ocket [Tt]imeout|NCCL error|ncclRemoteError|ncclSystemError"
    r"|uncorrectable ECC|hardware error|GPU is lost|fallen off the bus|ray\.exceptions\.\w*(Died|Lost|Unavailable)"
)


@contextmanager
def exit_with_message(
    invalid_input: tuple[type[Exception], ...] = (),
    reword: Callable[[str], str] = str,
    interrupted: str = "stopped.",
) -> Iterator[None]:
    """Context manager for a whole command, including Hydra: on an exception, print its message and exit with its code.

    `invalid_input`: error types that exit with 2, besides ConfigError, DataError and those of Hydra. `reword` adapts
    messages. `interrupted` is printed on Ctrl-C.
    """
    previous = os.environ.get(_FULL_ERRORS)
    os.environ[_FULL_ERRORS] = "1"  # Hydra raises errors instead of printing them in its own format
    try:
        with stop_signals_raise():
            yield
        report_to_supervisor(exiting=True)
    except KeyboardInterrupt as error:
        stopped = _describe_stop(error) if isinstance(error, StopSignal) else interrupted
        lines = [" ".join(filter(None, (stopped, _sentence(getattr(error, "resume_hint", None)))))]
        _exit(lines, error.exit_code if isinstance(error, StopSignal) else _INTERRUPTED, immediately=True)
    except Exception as error:
        text = _invalid_input_message(error, invalid_input)
        if text is not None:
            logger.debug("traceback:", exc_info=True)
            _exit(reword(text).splitlines(), 2)
        file = _write_traceback(error)
        traceback_line = f"Full traceback in {file}." if file else "The full traceback could not be written to a file."
        lines = [traceback_line, *map(reword, _message_lines(error)), *_location_line(error)]
        restarts = _supervisor_restarts(error)
        immediately = restarts or isinstance(error, RayLostError) or getattr(error, "exit_immediately", False)
        _exit(lines, 1, immediately, printed_by_supervisor=restarts)
    finally:
        if previous is None:
            os.environ.pop(_FULL_ERRORS, None)
        else:
            os.environ[_FULL_ERRORS] = previous


@contextmanager
def attach_resume_hint(trainer: Any) -> Iterator[None]:
    """Attach the run folder and `describe_resume` to errors that leave this block; report its end to the supervisor.

    `trainer`: the `trainer` block of the configuration.
    """
    folder = expand_path(trainer.default_local_dir)
    set_fallback_file(os.path.join(folder, "after_the_terminal.log"))
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        annotate_error(error, run_folder=folder, resume_hint=describe_resume(trainer))
        location = failure_location(error)
        first_sentence = _message_lines(error)[0].partition(". ")[0].rstrip(".")
        cause = f"{first_sentence} ({location})" if location else first_sentence
        restartable, step = _supervisor_restarts(error), getattr(error, "step", None)
        ending = {"cause": cause, "restartable": restartable, "location": location, "step": step}
        report_to_supervisor(ending=ending)
        raise
    finally:
        # The supervisor keeps the first `ending`, so this one counts only after a success.
        report_to_supervisor(ending={"cause": None, "restartable": False, "location": None})


def describe_resume(trainer: Any) -> str:
    """Return a clause: where a run with this `trainer` block would resume if the same command were run again.

    Checks file sizes; checksums are verified on loading.
    """
    if trainer.resume_mode == "disable":
        return "the same command starts from the beginning (trainer.resume_mode=disable)"
    if trainer.resume_mode == "resume_path":
        folder: Path | None = Path(str(trainer.resume_from_path))
    else:
        folder = _newest_complete_step(trainer)
    if folder is None:
        return "the same command starts from the beginning: no step was saved"
    step = folder.name.rpartition("_")[2]
    return f"the same command resumes at step {step} ({folder})"


def log_finished(trainer: Any, part: str = ".", merge_backend: str | None = None) -> None:
    """Log the last lines of a completed run: the path of the model, in the folder `part` of the newest complete step,
    and, with `merge_backend`, the commands of `describe_next_commands`. `trainer`: the `trainer` block."""
    step = _newest_complete_step(trainer)
    if step is None:
        root = Path(expand_path(trainer.default_local_dir)).absolute()
        logger.info("Training finished. No model was saved in %s.", root)
        return
    number, exported = step_of(step.name), step / part / "huggingface"
    if exported.is_dir():
        logger.info("Training finished at step %d. Model: %s", number, exported)
    else:
        logger.info(
            "Training finished at step %d. Checkpoint: %s (no model for transformers: hf_model is not in "
            "checkpoint.save_contents; `python -m verl.model_merger merge` writes one)",
            number,
            step / part,
        )
    if merge_backend is not None:
        logger.info("%s", "\n".join(describe_next_commands(trainer, part, merge_backend)))


def describe_next_commands(trainer: Any, part: str, merge_backend: str) -> list[str]:
    """Return a line for each command that follows a run: serve or export its model, train on, show its summary.

    `trainer`: its `trainer` block. `part`: folder of the model in a step. `merge_backend`: value of `--backend` in the
    export command, fsdp or megatron.
    """
    step = _newest_complete_step(trainer)
    commands = {}
    if step is not None:
        exported = step / part / "huggingface"
        if exported.is_dir():
            commands["serve"] = f"verl serve --model {shlex.quote(str(exported))}"
        else:
            local_dir = shlex.quote(str(step / part))
            folders = f"--local_dir {local_dir} --target_dir {local_dir}/huggingface"
            commands["export"] = f"verl merge --backend {merge_backend} {folders}"
        commands["train on"] = "the same command with a larger trainer.total_training_steps"
    if "file" in trainer.logger:
        folder = trainer.tracking_dir or os.path.join("runs", trainer.project_name, trainer.experiment_name)
        commands["summary"] = f"verl summary {shlex.quote(str(folder))}"
    return [f"  {name + ':':<9} {command}" for name, command in commands.items()]


def is_restartable(error: BaseException, is_retry: bool = False) -> bool:
    """Return whether another attempt may succeed: a process, peer or device was lost, or the run hangs.

    `is_retry`: this is not the first attempt.
    """
    return any(_is_transient(cause, is_retry) for cause in cause_chain(error))


def failure_location(error: BaseException) -> str | None:
    """Return step, phase and role of an error, by which the supervisor recognises that it occurs again.

    None if the error has no role, or was raised by the controller outside of phases: a second one may have another
    cause.
    """
    phase, step, role = (getattr(error, name, None) for name in ("phase", "step", "role"))
    if role is None or (phase is None and role == "TaskRunner"):
        return None
    when = f"{phase} of step {step}" if phase is not None else f"while starting, in {getattr(error, 'method', None)}"
    return f"{when}, role {role}"


def _is_transient(cause: BaseException, is_retry: bool) -> bool:
    """Return whether this exception of a cause chain, by its class or message, may not occur again after a restart."""
    names = {cls.__name__ for cls in type(cause).__mro__}
    if type(cause).__module__.startswith("ray."):
        names |= {f"{name}:ray" for name in names}
    if names & _RESTARTABLE or (is_retry and names & _RESTARTABLE_LATER):
        return True
    summary = getattr(cause, "summary", None)
    if summary is not None and cause.__cause__ is not None:
        return False  # the worker's exception is in the cause chain and is checked itself
    return isinstance(cause, RuntimeError) and _LOST_PEER.search(summary or str(cause)) is not None


def _newest_complete_step(trainer: Any) -> Path | None:
    steps = newest_first(Path(expand_path(trainer.default_local_dir)).absolute())
    return next(filter(has_expected_sizes, steps), None)


def _describe_stop(signal: StopSignal) -> str:
    return f"stopped by {signal.name}{' before the first step' if signal.before_first_step else ''}."


def _supervisor_restarts(error: BaseException) -> bool:
    """Return whether there is a supervisor, and it may restart the run after this error."""
    return is_supervised() and is_restartable(error, is_retry=previous_attempts() > 0)


def _exit(lines: list[str], code: int, immediately: bool = False, printed_by_supervisor: bool = False) -> None:
    """Print the lines and exit with `code`.

    `immediately`: wait neither for Ray, which may be gone, nor for threads. `printed_by_supervisor`: send the lines to
    the supervisor, which prints them unless it restarts the run.
    """
    report_to_supervisor(exiting=True)
    if printed_by_supervisor:
        report_to_supervisor(lines=lines)
    ray = sys.modules.get("ray")
    if not immediately and ray is not None and ray.is_initialized():
        ray.shutdown()  # before the lines are printed: until then, output of workers may follow them
    sys.stdout.flush()
    if not printed_by_supervisor:
        sys.stderr.write("\n".join([*lines, ""]))
        sys.stderr.flush()
    if immediately:
        os._exit(code)
    sys.exit(code)


def _invalid_input_message(error: Exception, more: tuple[type[Exception], ...]) -> str | None:
    """Return the message of an error in the user's input; None for other errors."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, yaml.MarkedYAMLError):
        return _yaml_message(error)
    data_error = _class_if_loaded("verl.utils.dataset.problems", "DataError")
    input_errors = (ConfigError, HydraException, OmegaConfBaseException, *data_error, *more)
    return str(error) if isinstance(error, input_errors) else None


def _yaml_message(error: Any) -> str:
    """Return file, line and cause of a YAML syntax error, with the line itself."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"1 problem in the configuration:\n1. {error}"
    cause = ", ".join(filter(None, (error.context, error.problem)))
    lines = [
        "1 problem in the configuration:",
        f"1. {mark.name}, line {mark.line + 1}, column {mark.column + 1}: {cause}. Correct it there or just above.",
    ]
    with suppress(OSError, ValueError, IndexError):  # not a file, not UTF-8, or changed meanwhile
        lines.append(f"   {Path(mark.name).read_text('utf-8').splitlines()[mark.line]}")
        lines.append(f"   {' ' * mark.column}^")
    return "\n".join(lines)


def _message_lines(error: BaseException) -> list[str]:
    """Return the most specific message: for a WorkerError, the message of the worker's exception."""
    summary = getattr(error, "summary", None)  # of a WorkerError, whose own message contains a traceback
    if summary is not None:
        cause = error.__cause__
        return _limit_lines(summary) if cause is None or isinstance(cause, RemoteTraceback) else _message_lines(cause)
    text = str(error).strip()
    # Messages of verl are sentences; those of other errors are often unclear without the type, e.g. KeyError('x').
    is_sentence = type(error) is ValueError or type(error).__module__.partition(".")[0] == "verl"
    if not is_sentence or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return _limit_lines(text)


def _limit_lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], "…"]


def _location_line(error: BaseException) -> list[str]:
    """Return a line with the location of the error and the resume hint; [] if neither is known."""
    role, rank, host = (getattr(error, name, None) for name in ("role", "rank", "host"))
    phase, step, method = (getattr(error, name, None) for name in ("phase", "step", "method"))
    location = []
    if role is not None:
        location += [f"role {role}", f"rank {rank}", f"host {host}"]
    if phase is not None:
        location.append(f"phase {phase} of step {step}")
    elif method is not None:
        location.append(f"while starting ({method})")
    # No resume hint for an error before the first step, which would occur again, unless a process died.
    worker_died = _class_if_loaded("verl.single_controller.base.worker_group", "WorkerDiedError")
    died = isinstance(error, (RayLostError, *worker_died))
    hint = getattr(error, "resume_hint", None) if phase is not None or died else None
    line = " ".join(filter(None, (_sentence(", ".join(location)), _sentence(hint))))
    return [line] if line else []


def _class_if_loaded(module: str, name: str) -> tuple[type[BaseException], ...]:
    """Return a tuple of the class; empty if its module is not loaded. Importing it here would import torch."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _sentence(text: str | None) -> str:
    """Return a clause with a capital letter and a full stop; "" for None."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _write_traceback(error: Exception) -> str | None:
    """Write the traceback with all causes to the run folder, or to the temporary folder.

    Return the path; None if neither is writable.
    """
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    head = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {platform.node()}, verl {__version__}",
        f"command: {' '.join(mask_arguments(sys.argv))}",
        "",
    ]
    text = "\n".join(head) + "".join(traceback.format_exception(type(error), error, error.__traceback__))
    for folder in filter(None, (getattr(error, "run_folder", None), tempfile.gettempdir())):
        with suppress(OSError):
            path = os.path.join(folder, name)
            # Independent of the locale, and of lone surrogates: the message may contain any text of a model.
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
            return path
    return None
