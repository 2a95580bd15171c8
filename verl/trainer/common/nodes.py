"""A Ray cluster of several machines: `trainer.node_rank=0` starts Ray's head and runs the job, other nodes join it.

The head survives the attempts of a supervised run. A worker node survives its head: it waits for another head at the
same address and joins it. So that worker nodes can distinguish the end of the job from a crash of the head, node 0
answers at the head's port for a few seconds after the job has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from verl.config import PPOConfig
from verl.trainer.common.ray_cluster import (
    LoggedWait,
    forget_cluster,
    format_seconds,
    in_two_attempts,
    set_start_limits,
    start_limit,
)
from verl.trainer.common.ray_token import check_token, create_token, enable_token, has_token, missing_token
from verl.trainer.recovery.ray_monitor import STALE_CLUSTER, RayProcesses, RayUnavailableError
from verl.trainer.recovery.signals import StopRequest, stop_on_signals
from verl.utils.network import HTTP2_PREFACE, address_towards, find_foreign_service, own_address, port_in_use
from verl.utils.process_tree import die_with_parent, kill_tree, with_descendants

logger = logging.getLogger(__name__)

# Time limit for an earlier head to release its port.
_PORT_FREE_S = 10.0
POLL_S = 1.0
# Time limit for notifying the other nodes of the end of the job.
_NOTIFY_S = 15.0
_JOB_ENDED = "verl: the job is over"
_OTHER_ADDRESS = "a program that listens on another address of this machine"
_NO_HEAD = "Start the command of node 0 (trainer.node_rank=0), or check why it ended."
_RAY_LOGS = "Ray's logs of this node are in the folder `logs` of its session, below RAY_TMPDIR or /tmp."


@dataclass(frozen=True)
class RayHead:
    """A Ray head that this process has started as a separate command, so that ending it affects no other cluster."""

    process: subprocess.Popen
    host: str
    port: int
    nodes: int
    """Number of nodes of the job, including this one."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_healthy(self) -> bool:
        """Return whether the head runs and responds."""
        try:
            return self.process.poll() is None and find_foreign_service(self.host, self.port) is None
        except OSError:
            return False


def start_head(config: PPOConfig) -> RayHead | None:
    """Start the head that the other nodes join, if `trainer.node_rank=0`. `stop_head` ends it."""
    trainer = config.trainer
    if trainer.node_rank != 0:
        return None
    host, port = trainer.master_addr or own_address(), trainer.master_port
    enable_token()
    create_token()
    head = in_two_attempts(lambda seconds: _try_head(config, host, port, seconds), config.ray_init.start_timeout)
    os.environ["RAY_ADDRESS"] = f"{host}:{port}"
    return head


def _try_head(config: PPOConfig, host: str, port: int, seconds: float) -> RayHead:
    """Start a head and wait until it answers; RuntimeError if it ends or does not answer within `seconds`."""
    _wait_until_free(host, port)  # the head of an earlier attempt may still use it
    options = [f"--node-ip-address={host}", f"--port={port}"]
    process = spawn_ray_start("--head", *options, *_cpu_options(config), stdout=subprocess.DEVNULL)
    head = RayHead(process, host, port, config.trainer.nnodes)
    deadline = time.monotonic() + seconds
    try:
        while not head.is_healthy():
            if process.poll() is not None:
                raise RuntimeError(f"the head at {host}:{port} ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no head answers at {host}:{port}")
            time.sleep(POLL_S)
    except BaseException:
        _kill_ray(process, f"{host}:{port}")
        raise
    return head


def ensure_head(config: PPOConfig, head: RayHead | None) -> RayHead | None:
    """Return the head if it is healthy, or else a new one."""
    if head is not None:
        if head.is_healthy():
            return head
        logger.warning("the Ray head at %s:%d is gone: starting it again", head.host, head.port)
        _kill_ray(head.process, f"{head.host}:{head.port}")
    return start_head(config)


def stop_head(head: RayHead | None) -> None:
    """End the head that this process started, and notify the nodes that joined it that the job is over."""
    if head is None:
        return
    _kill_ray(head.process, f"{head.host}:{head.port}")
    if head.nodes > 1:
        _notify_nodes(head)


def is_worker_node(config: PPOConfig) -> bool:
    """Return whether this process only provides its machine to node 0, which runs the job."""
    return config.trainer.node_rank is not None and config.trainer.node_rank > 0


def serve_as_node(config: PPOConfig) -> None:
    """Join the head at `trainer.master_addr:master_port`, repeatedly, until the job is over.

    Raises RayUnavailableError if no head responds within `trainer.nodes_within`, or if Ray on this node dies more than
    `trainer.max_restarts` times.
    """
    node = _WorkerNode(config)
    # A scheduler stops all nodes at the same time: this one stays while the head finishes its step.
    with stop_on_signals(lambda: None, node.kill, "this node stays until the head has saved") as request:
        try:
            while node.wait_for_head(request) and node.wait_for_token(request) and node.serve():
                pass
        finally:
            node.kill()
    logger.info("The job is over: this node is done.")


class _WorkerNode:
    """This machine as a node of another machine's head."""

    def __init__(self, config: PPOConfig) -> None:
        self._config, self._trainer = config, config.trainer
        self._host, self._port = config.trainer.master_addr or "", config.trainer.master_port
        self._process: subprocess.Popen | None = None
        self._deaths = 0
        self._gone_text = "does not answer yet"
        """Text for the head state "gone" in messages."""

    def wait_for_head(self, request: StopRequest) -> bool:
        """Wait for the head; return False if the job is over."""
        wait = LoggedWait(self._trainer.nodes_within)
        while (head := self._head_state()) not in ("running", "job over") and request.signal is None:
            what = f"the head at {self._host}:{self._port} {self._gone_text if head == 'gone' else head}"
            if not wait.sleep(f"{what}; waiting for it (trainer.nodes_within)"):
                raise RayUnavailableError(f"{what}, after {format_seconds(self._trainer.nodes_within)}", _NO_HEAD)
        return head == "running"

    def wait_for_token(self, request: StopRequest) -> bool:
        """Wait until this node has a Ray auth token, which may be copied late, and check that the head accepts it.

        Returns False if the job ended or a signal arrived first.
        """
        enable_token()
        wait = LoggedWait(self._trainer.nodes_within)
        while not has_token():
            if request.signal is not None or self._head_state() == "job over":
                return False
            cause, remedy = missing_token()
            if not wait.sleep(f"{cause}. {remedy} Waiting for it (trainer.nodes_within)"):
                raise RayUnavailableError(f"{cause}, after {format_seconds(self._trainer.nodes_within)}", remedy)
        check_token(f"{self._host}:{self._port}")
        return True

    def serve(self) -> bool:
        """Join the head, and stay until the head is gone or Ray on this node has died. Returns False if the job is
        over."""
        address = f"{self._host}:{self._port}"
        set_start_limits(start_limit(self._config.ray_init.start_timeout))
        logger.info("Joining the Ray head at %s as node %d...", address, self._trainer.node_rank)
        # By default Ray uses the address of the default route, which other nodes may not reach.
        own_address = f"--node-ip-address={address_towards(self._host, self._port)}"
        self._process = process = spawn_ray_start(f"--address={address}", own_address, *_cpu_options(self._config))
        start, processes = time.monotonic(), RayProcesses()
        while (
            (head := self._head_state(serving=True)) == "running"
            and process.poll() is None
            and not processes.describe_lost()
        ):
            # `ray start` does not notice a raylet that was terminated.
            processes = RayProcesses(with_descendants(process.pid))
            time.sleep(POLL_S)
        self.kill()
        self._gone_text = "is gone"
        if head == "running":
            self._count_death(time.monotonic() - start)
        return head != "job over"

    def kill(self) -> None:
        """Kill the Ray processes of this node."""
        if self._process is not None:
            _kill_ray(self._process, f"{self._host}:{self._port}")

    def _head_state(self, serving: bool = False) -> str:
        """Return "running", "gone", "job over", or a description of what responds instead of a head.

        While this node serves, only a closed port means that the head is gone: Ray itself handles a slow network.
        """
        try:
            other_service = find_foreign_service(self._host, self._port)
        except OSError as error:
            return "running" if serving and not isinstance(error, ConnectionRefusedError) else "gone"
        if other_service is not None and _JOB_ENDED in other_service:
            return "job over"
        if other_service is None or serving:
            return "running"
        return f"does not answer; its port is used by {other_service}"

    def _count_death(self, served: float) -> None:
        self._deaths = 1 if served > self._trainer.nodes_within else self._deaths + 1
        limit = self._trainer.max_restarts
        if self._deaths > limit:
            reason = f"Ray on this node died {self._deaths} times (trainer.max_restarts = {limit})"
            raise RayUnavailableError(reason, _RAY_LOGS)
        logger.warning("Ray on this node died: starting it again (%d of %d)", self._deaths, limit)


def _notify_nodes(head: RayHead) -> None:
    """Report the end of the job at the head's former port, until every node has connected or the time is over."""
    deadline = time.monotonic() + _NOTIFY_S
    try:
        with _listen(head, deadline) as server:
            left = head.nodes - 1
            while left:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                with server.accept()[0] as client:
                    left -= _notify(client)
    except TimeoutError:
        logger.warning("not all nodes were notified of the end of the job: the others wait for another head")
    except OSError as error:
        logger.warning("the other nodes cannot be notified of the end of the job and wait for another head: %s", error)


def _listen(head: RayHead, deadline: float) -> socket.socket:
    """Listen at the head's port, as soon as the killed processes have released it."""
    while True:
        try:
            return socket.create_server((head.host, head.port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _notify(client: socket.socket) -> bool:
    """Report the end of the job to a client; return whether it is a worker node.

    The clients of Ray, which also connect to this port, send a longer greeting or none.
    """
    with contextlib.suppress(OSError):
        client.settimeout(POLL_S)
        client.sendall(f"{_JOB_ENDED}\n".encode())
        client.shutdown(socket.SHUT_WR)
        return client.recv(512) == HTTP2_PREFACE
    return False


def _wait_until_free(host: str, port: int) -> None:
    """Wait for a head that is still exiting; raise RayUnavailableError if anything else uses the port."""
    deadline = time.monotonic() + _PORT_FREE_S
    while port_in_use(port):
        try:
            other_service = find_foreign_service(host, port)
        except OSError:
            other_service = _OTHER_ADDRESS
        if other_service not in (None, _OTHER_ADDRESS) or time.monotonic() > deadline:
            raise RayUnavailableError(*_port_in_use(host, port, other_service))
        time.sleep(POLL_S)


def _port_in_use(host: str, port: int, other_service: str | None) -> tuple[str, str]:
    """Return cause and remedy if `trainer.master_port` is in use, by this service or (None) by a Ray head."""
    if other_service is None:
        return f"trainer.master_port = {port}: a Ray head runs at {host}:{port} already", STALE_CLUSTER
    remedy = "Set another trainer.master_port on all nodes, or end the program that uses it."
    return f"trainer.master_port = {port}: the port of {host} is used by {other_service}, not by a Ray head", remedy


def spawn_ray_start(*arguments: str, stdout: int | None = None) -> subprocess.Popen:
    """Run `ray start --block` in its own session, which signals to this one do not reach; it dies with this process."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    return subprocess.Popen(command, stdout=stdout, start_new_session=True, preexec_fn=die_with_parent)


def _kill_ray(process: subprocess.Popen, address: str) -> None:
    """Kill a `ray start` and its descendants, and remove the cluster's address file, so that no command joins it."""
    kill_tree(process.pid)
    process.wait()
    forget_cluster(address)


def _cpu_options(config: PPOConfig) -> list[str]:
    return [] if config.ray_init.num_cpus is None else [f"--num-cpus={config.ray_init.num_cpus}"]
