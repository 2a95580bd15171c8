"""The Ray cluster of a run: start or join it, and wait for its nodes.

Either a cluster is running (`ray start` on every node, or `trainer.node_rank`: see `nodes`), or one is started on this
machine: with time limits scaled by the machine's load, and in two attempts. Ray is imported when it is needed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl.config import RunConfig
from verl.trainer.common.ray_token import check_token, rejected_token
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.recovery.ray_monitor import RayProcesses, RayUnavailableError, separate_process_groups
from verl.trainer.recovery.supervised_process import previous_attempts
from verl.utils.concurrency import run_in_thread
from verl.utils.console import LINE
from verl.utils.network import find_foreign_service
from verl.utils.process_tree import children, with_descendants
from verl.utils.resources import describe_load, load_factor

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_LOG_INTERVAL_S = 20.0
# Logs at every start that authentication is enabled.
_AUTHENTICATION_LOGGER = "ray._private.authentication.authentication_token_setup"
_TOO_FEW_NODES = "Check the missing nodes (`ray status`), join them again, or set trainer.nnodes."

# Limit for starting Ray on an idle machine; Ray's own limits are 30 to 60 s.
_IDLE_LIMIT_S = 120.0
_NODE_LOOKUP_POLL_S = 0.5
# From this load factor on, the error message names the load as a likely cause.
_BUSY_FACTOR = 1.5
# Environment variables with time limits of Ray, and their units in seconds.
LIMITS = {
    "RAY_gcs_server_port_wait_time_s": 1.0,
    "RAY_py_gcs_connect_timeout_s": 1.0,
    "RAY_worker_register_timeout_seconds": 1.0,
    "RAY_agent_register_timeout_ms": 0.001,
}
# Keeps Ray from printing C++ stacks of all threads when a signal ends it.
NO_CPP_STACKS = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
# Environment variables that were set by `set_start_limits`, not by the user.
set_here: set[str] = set()

Result = TypeVar("Result")


def start_or_join_ray(
    trainer: RunConfig,
    pools: Sequence[Sequence[int]],
    *,
    num_cpus: int | None,
    start_timeout: float | None,
    nodes: int = 1,
    head_pid: int | None = None,
) -> RayProcesses:
    """Start a Ray cluster, or join one and wait until it has `nodes` nodes and room for the pools. If this process is
    connected to Ray already, that cluster is used as it is.

    Returns the processes to monitor: those of a cluster started here; for a joined cluster its GCS and, if this machine
    is its head, the processes of `ray start` (`head_pid`).
    """
    import ray

    processes = RayProcesses()
    if not ray.is_initialized():
        is_retry = previous_attempts() > 0
        quiet = trainer.console == LINE
        processes = start_ray(num_cpus, trainer.nodes_within if is_retry else 0, start_timeout, quiet)
        if not processes:
            wait_for_nodes(trainer, pools, is_retry, nodes)
    if not processes:
        head_pids = () if head_pid is None else with_descendants(head_pid)
        processes = RayProcesses(head_pids, ray.get_runtime_context().gcs_address)
    return processes


def start_ray(
    num_cpus: int | None = None, within: float = 0.0, start_timeout: float | None = None, quiet: bool = False
) -> RayProcesses:
    """Join the running cluster, or start one; return the processes started here.

    `within`: seconds to wait for a cluster that does not respond; `start_timeout`: `ray_init.start_timeout`.
    `quiet`: Ray logs warnings only, and does not log that authentication is enabled.
    """
    import ray

    level = logging.WARNING if quiet else logging.INFO
    if quiet:
        logging.getLogger(_AUTHENTICATION_LOGGER).setLevel(logging.ERROR)

    logger.info("Initializing Ray...")
    wait = LoggedWait(within)
    while True:
        try:
            _check_cluster_responds(_known_cluster())
            break
        except RayUnavailableError as error:
            if not wait.sleep(f"{error.reason}; waiting for it (trainer.nodes_within)"):
                raise
    runtime_env = get_ppo_ray_runtime_env()
    _disable_cpp_stacks()

    def init_local() -> Any:
        # Workers inherit this environment. With a `runtime_env`, each would be started by another Python process that
        # imports Ray too, and the workers that Ray starts in advance could not be used.
        with _environment(runtime_env["env_vars"]):
            return ray.init(num_cpus=num_cpus, logging_level=level)

    def init() -> Any:
        try:
            return ray.init(num_cpus=num_cpus, runtime_env=runtime_env, logging_level=level)
        except ValueError:
            if num_cpus is None:
                raise
            # Ray rejects a number of CPUs for a running cluster.
            context = ray.init(runtime_env=runtime_env, logging_level=level)
            logger.warning("ray_init.num_cpus has no effect: a running Ray cluster was joined.")
            return context

    if not joins_cluster():
        context, pids = start_local_cluster(init_local, start_timeout)
    else:
        try:
            with separate_process_groups() as pids:
                context = init()
        except ray.exceptions.AuthenticationError as error:
            raise RayUnavailableError(*rejected_token(str(_known_cluster()))) from error
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            # Ray reports a rejected token as a cluster that does not respond.
            check_token(str(_known_cluster()))
            raise RayUnavailableError(_first_line(error)) from error
    if context.dashboard_url:  # with the extra `dashboard`
        logger.info("Ray dashboard: http://%s", context.dashboard_url.removeprefix("http://"))
    return RayProcesses(pids)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which the environment of this process contains `variables`."""
    missing = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    before = {name: os.environ.get(name) for name in missing}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _disable_cpp_stacks() -> None:
    """Keep Ray from printing C++ stacks when a signal ends this process, unless the user has set the variable.

    The environment variable alone only affects new processes: Ray reads it when it is imported.
    """
    from ray._private import ray_constants

    if os.environ.setdefault(NO_CPP_STACKS, "1") == "1":
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True


def joins_cluster() -> bool:
    """Return whether `ray.init` would join a cluster instead of starting one on this machine."""
    return _known_cluster() not in (None, "", "local")


def find_cluster_problem() -> str | None:
    """Return why the cluster that `ray.init` would join cannot be used; None if it responds, or there is none."""
    try:
        _check_cluster_responds(_known_cluster())
    except RayUnavailableError as error:
        return str(error)
    return None


def forget_cluster(address: str) -> None:
    """Remove the address file of `ray start`, if it contains this address."""
    if _address_file().is_file() and _address_file().read_text().strip() == address:
        _address_file().unlink(missing_ok=True)


def wait_for_nodes(
    trainer: RunConfig, pools: Sequence[Sequence[int]], is_retry: bool = False, at_least: int = 1
) -> None:
    """Wait until the cluster has `at_least` nodes and room for the pools (processes per node), up to
    `trainer.nodes_within` seconds.

    Nodes may join late, and nodes of a failed attempt may have to restart. At the first attempt, return immediately if
    the nodes would be too small even when idle: placing the ranks then reports what is missing. At a retry
    (`is_retry`), wait in any case, because the cluster was large enough before.
    """
    from verl.single_controller.ray.resource_pool import alive_nodes, pools_fit

    on_gpus, required = trainer.device == "cuda", max(at_least, *map(len, pools))
    wait = LoggedWait(trainer.nodes_within)
    while True:
        # A head node without GPUs does not count.
        nodes = [node for node in alive_nodes() if node.total_gpus or not on_gpus]
        complete = len(nodes) >= required
        if complete and pools_fit(pools, on_gpus, nodes):
            return
        if complete and not is_retry and not pools_fit(pools, on_gpus, [node.without_jobs() for node in nodes]):
            return
        available = f"{min(len(nodes), required)} of {required} nodes"
        if on_gpus:
            available += f", {sum(node.free_gpus for node in nodes):g} of {sum(map(sum, pools))} GPUs"
        if not wait.sleep(f"{available}: waiting for the others (trainer.nodes_within)"):
            raise RayUnavailableError(f"{available} after {format_seconds(trainer.nodes_within)}", _TOO_FEW_NODES)


class LoggedWait:
    """A wait with a time limit that regularly logs its reason and the remaining time."""

    def __init__(self, seconds: float) -> None:
        self._end, self._next_log = time.monotonic() + seconds, 0.0

    def sleep(self, reason: str) -> bool:
        """Sleep for one polling interval; return False if the time is over."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            logger.warning("%s, %s left", reason, format_seconds(self._end - now))
        time.sleep(min(_POLL_S, self._end - now))
        return True


def format_seconds(seconds: float) -> str:
    """Return `89 s`, or from 90 s on the number of minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def start_limit(configured: float | None = None) -> float:
    """Return the seconds that Ray may take to start: the configured value, or 120 s scaled by the machine's load."""
    return _IDLE_LIMIT_S * load_factor() if configured is None else configured


def set_start_limits(seconds: float) -> None:
    """Set the start limits of Ray in the environment, except variables that the user has set."""
    values = {name: str(round(seconds / unit)) for name, unit in LIMITS.items()} | {NO_CPP_STACKS: "1"}
    for name, value in values.items():
        if name in set_here or name not in os.environ:
            set_here.add(name)
            os.environ[name] = value


def in_two_attempts(attempt: Callable[[float], Result], configured: float | None = None) -> Result:
    """Return `attempt(seconds)`; call it once more if it fails. `seconds` is its time limit, also set for Ray itself.

    `configured`: `ray_init.start_timeout`. A RayUnavailableError is not retried: its message has a remedy.
    """
    seconds, is_second = 0.0, False
    while True:
        seconds = max(seconds, start_limit(configured))
        set_start_limits(seconds)
        try:
            return attempt(seconds)
        except RayUnavailableError:
            raise
        except Exception as error:  # Ray raises plain exceptions here
            if is_second:
                reason = f"it did not start in two attempts of up to {seconds:.0f} s: {_first_line(error)}"
                raise RayUnavailableError(reason, _start_remedy(seconds)) from error
            logger.warning("Ray did not start (%s; %s). Starting it again.", _first_line(error), describe_load())
        is_second = True


def start_local_cluster(init: Callable[[], Any], configured: float | None = None) -> tuple[Any, list[int]]:
    """Call `init` (a `ray.init` that starts a local cluster) in up to two attempts with time limits.

    Returns its result and the pids that it started. The processes of a failed attempt are killed.
    """

    def attempt(seconds: float) -> tuple[Any, list[int]]:
        pids: list[int] = []
        try:
            with _node_lookup(seconds), separate_process_groups() as pids:
                return init(), pids
        except Exception:
            import ray

            ray.shutdown()
            RayProcesses(pids).kill()
            raise
        except BaseException:
            RayProcesses(pids).kill()
            raise

    return in_two_attempts(attempt, configured)


@contextmanager
def _node_lookup(seconds: float) -> Iterator[None]:
    """Let `ray.init` wait up to `seconds` for its raylet: Ray's own limit of 30 s cannot be configured.

    A lookup blocks in C++ while the GCS does not respond. It runs in a thread, so that this one handles signals. As
    soon as the GCS or the raylet ends, ConnectionError is raised, which `ray.init` does not retry.
    """
    from ray._private import services

    lookup = services.get_node
    deadline, earlier = time.monotonic() + seconds, set(children(os.getpid()))

    def check_start() -> None:
        started = [pid for pid in children(os.getpid()) if pid not in earlier]
        if (lost := RayProcesses(started).describe_lost()) is not None:
            raise ConnectionError(f"Ray's own processes ended while Ray was starting ({lost})")
        if time.monotonic() > deadline:
            raise ConnectionError(f"its raylet did not register within {seconds:.0f} s")

    def get_node(*args: Any, **kwargs: Any) -> Any:
        while True:
            result = run_in_thread("ray-node-lookup", partial(lookup, *args, **kwargs), join_at_exit=False)
            while not wait([result], timeout=_NODE_LOOKUP_POLL_S).done:
                check_start()
            try:
                return result.result()
            except RuntimeError:  # the raylet is not registered yet
                check_start()
            time.sleep(_NODE_LOOKUP_POLL_S)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = lookup


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _start_remedy(seconds: float) -> str:
    logs = f"Ray's logs are in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs."
    more = f"ray_init.start_timeout={2 * seconds:.0f}"
    if load_factor() < _BUSY_FACTOR:
        return f"{logs} If they show no error, allow more time with {more}."
    return (
        f"The machine is busy ({describe_load()}): stop other processes or wait for them, or allow more time with"
        f" {more}. {logs}"
    )


def _known_cluster() -> str | None:
    """Return the address of the cluster that `ray.init` would join: RAY_ADDRESS, or the file written by `ray start`."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    return _address_file().read_text().strip() if _address_file().is_file() else None


def _address_file() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")


def _check_cluster_responds(address: str | None) -> None:
    """Raise RayUnavailableError if no Ray responds at the address. Ray itself would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        other_service = find_foreign_service(host, int(port))
    except OSError as error:
        raise RayUnavailableError(f"nothing answers at {address}: {error}") from error
    if other_service is not None:
        source = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else f"the file {_address_file()}"
        raise RayUnavailableError(
            f"at port {port} of {host} answers {other_service}: not Ray",
            f"Correct {source}, or unset it and start a new Ray cluster (RAY_ADDRESS=local).",
        )
