"""Starting or joining Ray. Nothing here imports it before it is needed.

Either a cluster runs already (`ray start` on every node), or this machine alone is one, or `trainer.node_rank` says
which of several nodes this is: 0 starts the head and runs the job, the others join it and serve until it ends.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from verl.config import PPOConfig
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.exceptions import Travels

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 600.0
# Ray protects a cluster with a token in the head's home folder. Nodes that do not share it need a copy of it, or
# RAY_AUTH_MODE=disabled everywhere; the user's own setting stands.
_AUTH_MODE = "token"


class RayUnavailableError(Travels, RuntimeError):
    """Ray could not be started or joined; the message says what to run."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Ray cannot start or join its cluster ({reason}). "
            "A stale cluster is the usual cause: run `ray stop`, then `ray start --head`, and try again."
        )


def start_ray(num_cpus: int | None = None) -> None:
    """Join the cluster that runs here, or start one."""
    import ray

    logger.info("Initializing Ray...")
    _check_cluster_answers(_known_cluster())
    runtime_env = get_ppo_ray_runtime_env()
    try:
        try:
            started = ray.init(num_cpus=num_cpus, runtime_env=runtime_env)
        except ValueError:
            if num_cpus is None:
                raise
            # Ray refuses a number of CPUs for a cluster that is already running.
            started = ray.init(runtime_env=runtime_env)
            logger.warning("ray_init.num_cpus has no effect: a running Ray cluster was joined.")
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise RayUnavailableError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    if started.dashboard_url:  # with the extra `dashboard`
        logger.info("Ray dashboard: http://%s", started.dashboard_url.removeprefix("http://"))


def _known_cluster() -> str | None:
    """Address of the cluster that `ray.init` would join: the environment's, or the one noted by `ray start`."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return note.read_text().strip() if note.is_file() else None


def _check_cluster_answers(address: str | None) -> None:
    """Ray itself would wait for minutes for a cluster that is gone."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise RayUnavailableError(f"nothing answers at {address}: {error}") from error


def joins_a_head(config: PPOConfig) -> bool:
    """Whether this process only lends its machine to the node that runs the job."""
    return config.trainer.node_rank is not None and config.trainer.node_rank > 0


def serve_as_node(config: PPOConfig) -> None:
    """Join the head at `trainer.master_addr:master_port` and stay until it ends."""
    address = f"{config.trainer.master_addr}:{config.trainer.master_port}"
    logger.info("Joining the Ray head at %s as node %d...", address, config.trainer.node_rank)
    _wait_for(config.trainer.master_addr or "", config.trainer.master_port)
    os.environ.setdefault("RAY_AUTH_MODE", _AUTH_MODE)
    # --block: the command lives as long as the node, and the node as long as the head.
    subprocess.run(_ray("start", f"--address={address}", "--block", *_cpus(config)), check=False)
    logger.info("The head is gone: this node is done.")


def start_head(config: PPOConfig) -> subprocess.Popen | None:
    """With `trainer.node_rank=0`: start the head that the other nodes join. `stop_head` ends it."""
    trainer = config.trainer
    if trainer.node_rank != 0:
        return None
    os.environ.setdefault("RAY_AUTH_MODE", _AUTH_MODE)
    host = trainer.master_addr or "127.0.0.1"
    options = [f"--node-ip-address={host}", f"--port={trainer.master_port}"]
    # --block: the head is this command, so ending it ends this head and no other Ray of the machine.
    head = subprocess.Popen(_ray("start", "--head", "--block", *options, *_cpus(config)), stdout=subprocess.DEVNULL)
    _wait_for(host, trainer.master_port, alive=head)
    os.environ["RAY_ADDRESS"] = f"{host}:{trainer.master_port}"
    return head


def stop_head(head: subprocess.Popen | None) -> None:
    """End the head that this process started, and with it the nodes that joined."""
    if head is not None:
        head.terminate()
        head.wait(timeout=60)


def wait_for_nodes(config: PPOConfig) -> None:
    """With `trainer.node_rank`, wait until all nodes have joined."""
    import ray

    if config.trainer.node_rank is None:
        return
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while (alive := sum(node["Alive"] for node in ray.nodes())) < config.trainer.nnodes:
        if time.monotonic() > deadline:
            raise RayUnavailableError(f"{alive} of trainer.nnodes = {config.trainer.nnodes} nodes joined in time")
        time.sleep(1)


def _wait_for(host: str, port: int, alive: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline or (alive is not None and alive.poll() is not None):
                raise RayUnavailableError(f"no head answers at {host}:{port}: {error}") from error
            time.sleep(1)


def _ray(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def _cpus(config: PPOConfig) -> list[str]:
    return [] if config.ray_init.num_cpus is None else [f"--num-cpus={config.ray_init.num_cpus}"]
