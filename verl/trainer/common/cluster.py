"""Starting or joining Ray, and waiting for its nodes. Nothing here imports it before it is needed.

Either a cluster runs already (`ray start` on every node, or `trainer.node_rank`: see `nodes`), or this machine is one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config import RunConfig
from verl.trainer.common.own_ray import OwnRay, started_apart
from verl.trainer.common.ray_startup import STALE, RayUnavailableError, start_patiently
from verl.trainer.common.ray_token import check_token, rejected_token
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.network import find_foreign_service

__all__ = ["STALE", "RayUnavailableError", "Wait", "forget_cluster", "in_words", "start_ray", "wait_for_nodes"]

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_SAY_S = 20.0
_TOO_FEW = "See what became of the others (`ray status`), join them again, or set trainer.nnodes."


def start_ray(num_cpus: int | None = None, within: float = 0.0, start_timeout: float | None = None) -> OwnRay:
    """Join the cluster that runs here, or start one; what was started is returned.

    `within`: seconds that a cluster which does not answer is waited for; `start_timeout`: `ray_init.start_timeout`.
    """
    import ray

    logger.info("Initializing Ray...")
    wait = Wait(within)
    while True:
        try:
            _check_cluster_answers(_known_cluster())
            break
        except RayUnavailableError as error:
            if not wait.goes_on(f"{error.reason}; waiting for it (trainer.nodes_within)"):
                raise
    runtime_env = get_ppo_ray_runtime_env()

    def init() -> Any:
        try:
            return ray.init(num_cpus=num_cpus, runtime_env=runtime_env)
        except ValueError:
            if num_cpus is None:
                raise
            # Ray refuses a number of CPUs for a cluster that is already running.
            started = ray.init(runtime_env=runtime_env)
            logger.warning("ray_init.num_cpus has no effect: a running Ray cluster was joined.")
            return started

    if _known_cluster() in (None, "local"):
        started, pids = start_patiently(init, start_timeout)
    else:
        try:
            with started_apart() as pids:
                started = init()
        except ray.exceptions.AuthenticationError as error:
            raise RayUnavailableError(*rejected_token(str(_known_cluster()))) from error
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            # Ray reports a rejected token as a cluster that does not answer.
            check_token(str(_known_cluster()))
            raise RayUnavailableError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    if started.dashboard_url:  # with the extra `dashboard`
        logger.info("Ray dashboard: http://%s", started.dashboard_url.removeprefix("http://"))
    return OwnRay(pids)


def joins_cluster() -> bool:
    """Whether `ray.init` would join a cluster instead of starting one on this machine."""
    return _known_cluster() not in (None, "", "local")


def _known_cluster() -> str | None:
    """Address of the cluster that `ray.init` would join: the environment's, or the one noted by `ray start`."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    return _note().read_text().strip() if _note().is_file() else None


def _note() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")


def forget_cluster(address: str) -> None:
    """Remove the note of `ray start`, if it tells of this cluster."""
    if _note().is_file() and _note().read_text().strip() == address:
        _note().unlink(missing_ok=True)


def _check_cluster_answers(address: str | None) -> None:
    """Ray itself would wait for minutes for a cluster that is gone, or for a stranger's answer."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        stranger = find_foreign_service(host, int(port))
    except OSError as error:
        raise RayUnavailableError(f"nothing answers at {address}: {error}") from error
    if stranger is not None:
        source = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else f"the note {_note()}"
        raise RayUnavailableError(
            f"at port {port} of {host} answers {stranger}: not Ray",
            f"Correct {source}, or unset it and let the command start a Ray of its own (RAY_ADDRESS=local).",
        )


def wait_for_nodes(trainer: RunConfig, pools: Sequence[Sequence[int]], again: bool = False, at_least: int = 1) -> None:
    """Until the cluster that was joined has room for the pools (processes per node), or `nodes_within` is over.

    Nodes join late, and those of an attempt that died may have to start anew. `again`: this is not the first attempt,
    so that even a cluster whose nodes are too small for good had been large enough. At a first start that is not waited
    for: what places the ranks says at once what is missing.
    """
    from verl.single_controller.ray.resource_pool import alive_nodes, room_for

    on_gpus, least = trainer.device == "cuda", max(at_least, *map(len, pools))
    wait = Wait(trainer.nodes_within)
    while True:
        # A head without GPUs is none of the nodes that are asked for.
        nodes = [node for node in alive_nodes() if node.total_gpus or not on_gpus]
        complete = len(nodes) >= least
        if complete and room_for(pools, on_gpus, nodes):
            return
        if complete and not again and not room_for(pools, on_gpus, [node.when_free() for node in nodes]):
            return
        there = f"{min(len(nodes), least)} of {least} nodes"
        if on_gpus:
            there += f", {sum(node.free_gpus for node in nodes):g} of {sum(map(sum, pools))} GPUs"
        if not wait.goes_on(f"{there}: waiting for the rest (trainer.nodes_within)"):
            raise RayUnavailableError(f"{there} after {in_words(trainer.nodes_within)}", _TOO_FEW)


class Wait:
    """A wait that says, at once and every so often, what for and how long yet."""

    def __init__(self, seconds: float) -> None:
        self._end, self._say_at = time.monotonic() + seconds, 0.0

    def goes_on(self, what: str) -> bool:
        """Say it, if it is time to, and sleep a little; False when the time is over."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._say_at:
            self._say_at = now + _SAY_S
            logger.warning("%s, %s left", what, in_words(self._end - now))
        time.sleep(min(_LOOK_S, self._end - now))
        return True


def in_words(seconds: float) -> str:
    """Seconds up to a minute and a half, then minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
