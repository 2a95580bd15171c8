"""Start Ray on this machine: time limits scaled by the load, a second attempt, a short message on a stop signal."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.trainer.common.own_ray import OwnRay, started_apart
from verl.trainer.common.signals import StopSignal
from verl.utils.exceptions import PicklableError
from verl.utils.process_tree import children, command_line
from verl.utils.resources import describe_load, load_factor

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STALE = "A stale cluster is the usual cause: run `ray stop`, then `ray start --head`, and try again."
# Limit on an idle machine; Ray's own limits are 30 to 60 s.
_IDLE_LIMIT_S = 120.0
_POLL_S = 0.5
# Load factor from which the error message blames the load.
_BUSY_FACTOR = 1.5
# Environment variables of Ray's limits, and their units in seconds.
_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": 1.0,
    "RAY_py_gcs_connect_timeout_s": 1.0,
    "RAY_worker_register_timeout_seconds": 1.0,
    "RAY_agent_register_timeout_ms": 0.001,
}
# Keeps Ray from printing C++ stacks of all threads when a signal ends it.
_NO_CPP_STACKS = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
# Environment variables that `allow_time` has set: it may change them again.
_set_here: set[str] = set()


class RayUnavailableError(PicklableError, RuntimeError):
    """Ray could not be started or joined; the message says what to run."""

    def __init__(self, reason: str, remedy: str = STALE) -> None:
        self.reason = reason
        super().__init__(f"Ray cannot start or join its cluster ({reason}). {remedy}")


def start_timeout(configured: float | None = None) -> float:
    """Return the seconds that Ray may take to start: the configured value, or 120 s scaled by the machine's load."""
    return _IDLE_LIMIT_S * load_factor() if configured is None else configured


def allow_time(seconds: float) -> None:
    """Set the start limits of Ray in the environment; variables that the user has set are kept."""
    values = {name: str(round(seconds / unit)) for name, unit in _LIMITS.items()} | {_NO_CPP_STACKS: "1"}
    for name, value in values.items():
        if name in _set_here or name not in os.environ:
            _set_here.add(name)
            os.environ[name] = value


def start_patiently(init: Callable[[], Any], configured: float | None = None) -> tuple[Any, list[int]]:
    """Call `init` (a `ray.init` that starts a local cluster) with time limits, and once more if it fails.

    Returns its result and the ids of the processes that it started. A failed attempt leaves no process behind.
    """
    return in_two_attempts(lambda seconds: _attempt(init, seconds), configured)


def in_two_attempts(attempt: Callable[[float], Result], configured: float | None = None) -> Result:
    """Call `attempt` with the seconds it may take, and once more if it fails; Ray's own limits are set to the same.

    RayUnavailableError is raised at once: it has a remedy of its own.
    """
    seconds = start_timeout(configured)
    allow_time(seconds)
    try:
        return attempt(seconds)
    except RayUnavailableError:
        raise
    except Exception as error:  # noqa: BLE001 - Ray raises plain exceptions here; the second attempt's is raised
        reason = _reason(error)
        logger.warning("Ray did not start (%s; %s). Starting it again.", reason, describe_load())
    seconds = max(seconds, start_timeout(configured))
    allow_time(seconds)
    try:
        return attempt(seconds)
    except RayUnavailableError:
        raise
    except Exception as error:
        reason = f"it did not start in two attempts of up to {seconds:.0f} s: {_reason(error)}"
        raise RayUnavailableError(reason, _remedy(seconds)) from error


def _attempt(init: Callable[[], Any], seconds: float) -> tuple[Any, list[int]]:
    pids: list[int] = []
    try:
        with _node_lookup(seconds), started_apart() as pids:
            return init(), pids
    except Exception:
        import ray

        ray.shutdown()
        OwnRay(pids).kill()
        raise
    except BaseException as error:
        OwnRay(pids).kill()
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # raised by Ray's SIGTERM handler
            raise StopSignal("SIGTERM") from None
        raise


@contextmanager
def _node_lookup(seconds: float) -> Iterator[None]:
    """Let `ray.init` wait up to `seconds` for its raylet: Ray's own limit of 30 s cannot be configured."""
    from ray._private import services

    lookup = services.get_node
    deadline = time.monotonic() + seconds

    def get_node(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return lookup(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > deadline or not _raylet_runs():
                    raise
            time.sleep(_POLL_S)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = lookup


def _raylet_runs() -> bool:
    return any(b"raylet" in command_line(pid) for pid in children(os.getpid()))


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _remedy(seconds: float) -> str:
    logs = f"Ray's logs are in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs."
    more = f"ray_init.start_timeout={2 * seconds:.0f}"
    if load_factor() < _BUSY_FACTOR:
        return f"{logs} If they show no error, allow more time with {more}."
    return (
        f"The machine is busy ({describe_load()}): stop other processes or wait for them, or allow more time with"
        f" {more}. {logs}"
    )
