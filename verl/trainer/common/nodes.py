"""Several machines without a cluster: `trainer.node_rank=0` starts Ray's head and runs the job, other nodes join it.

The head outlives attempts of a supervised run. A node outlives its head: it waits for another one at the same address,
and joins that. So that it can tell a job that is over from a head that crashed, whoever ends the head in an orderly way
answers at its port for a few seconds more.
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
from verl.trainer.common.cluster import STALE, RayUnavailableError, Wait, forget_cluster, in_words
from verl.trainer.common.own_ray import OwnRay
from verl.trainer.common.ray_startup import allow_time, in_two_attempts, start_timeout
from verl.trainer.common.ray_token import check_token, create_token, enable_token, has_token, missing_token
from verl.trainer.common.signals import Asked, stop_on_signals
from verl.utils.network import HTTP2_PREFACE, address_towards, find_foreign_service, own_address, port_in_use
from verl.utils.process_tree import die_with_parent, kill_tree, with_descendants

logger = logging.getLogger(__name__)

_FREED_S = 10.0
_LOOK_S = 1.0
_FAREWELL_S = 15.0
_OVER = "verl: the job is over"
_ELSEWHERE = "something else, on another address of this machine"
_NO_HEAD = "Start the command of node 0 (trainer.node_rank=0), or see why it ended."
_DIES = "Ray's own logs of it are in the folder `logs` of its session, below RAY_TMPDIR or /tmp."


@dataclass(frozen=True)
class Head:
    """The head that this process started: a command of its own, so that ending it ends no other Ray of the machine."""

    process: subprocess.Popen
    host: str
    port: int
    nodes: int
    """Of the whole job, this one included."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def well(self) -> bool:
        """Whether it runs and answers."""
        try:
            return self.process.poll() is None and find_foreign_service(self.host, self.port) is None
        except OSError:
            return False


def start_head(config: PPOConfig) -> Head | None:
    """With `trainer.node_rank=0`: start the head that the other nodes join. `stop_head` ends it."""
    trainer = config.trainer
    if trainer.node_rank != 0:
        return None
    host, port = trainer.master_addr or own_address(), trainer.master_port
    enable_token()
    create_token()
    head = in_two_attempts(lambda seconds: _try_head(config, host, port, seconds), config.ray_init.start_timeout)
    os.environ["RAY_ADDRESS"] = f"{host}:{port}"
    return head


def _try_head(config: PPOConfig, host: str, port: int, seconds: float) -> Head:
    """Start a head and wait until it answers; RuntimeError if it ends or does not answer within `seconds`."""
    _wait_until_free(host, port)  # also of an earlier attempt
    options = [f"--node-ip-address={host}", f"--port={port}"]
    process = _start_ray("--head", *options, *_cpus(config), stdout=subprocess.DEVNULL)
    head = Head(process, host, port, config.trainer.nnodes)
    deadline = time.monotonic() + seconds
    try:
        while not head.well():
            if process.poll() is not None:
                raise RuntimeError(f"the head at {host}:{port} ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no head answers at {host}:{port}")
            time.sleep(_LOOK_S)
    except BaseException:
        _end(process, f"{host}:{port}")
        raise
    return head


def running_head(config: PPOConfig, head: Head | None) -> Head | None:
    """A head that is well: this one, or another in its place."""
    if head is not None:
        if head.well():
            return head
        logger.warning("the Ray head at %s:%d is gone: starting it again", head.host, head.port)
        _end(head.process, f"{head.host}:{head.port}")
    return start_head(config)


def stop_head(head: Head | None) -> None:
    """End the head that this process started, and tell the nodes that joined it that the job is over."""
    if head is None:
        return
    _end(head.process, f"{head.host}:{head.port}")
    if head.nodes > 1:
        _say_farewell(head)


def joins_a_head(config: PPOConfig) -> bool:
    """Whether this process only lends its machine to the node that runs the job."""
    return config.trainer.node_rank is not None and config.trainer.node_rank > 0


def serve_as_node(config: PPOConfig) -> None:
    """Join the head at `trainer.master_addr:master_port`, again and again, until the job is over.

    RayUnavailableError where the head does not come (back) within `trainer.nodes_within`, or where this node dies
    more often than `trainer.max_restarts`.
    """
    node = _Node(config)
    # A scheduler stops all nodes at once: this one serves on while the head finishes its step.
    with stop_on_signals(lambda: None, node.end, "this node stays until the head has saved") as asked:
        try:
            while node.head_comes(asked) and node.wait_for_token(asked) and node.serve():
                pass
        finally:
            node.end()
    logger.info("The job is over: this node is done.")


class _Node:
    """This machine as a node of another one's head."""

    def __init__(self, config: PPOConfig) -> None:
        self._config, self._trainer = config, config.trainer
        self._host, self._port = config.trainer.master_addr or "", config.trainer.master_port
        self._process: subprocess.Popen | None = None
        self._deaths = 0
        self._before = "does not answer yet"

    def head_comes(self, asked: Asked) -> bool:
        """Wait for the head; False if the job is over."""
        wait = Wait(self._trainer.nodes_within)
        while (head := self._head()) not in ("here", "over") and asked.by is None:
            what = f"the head at {self._host}:{self._port} {self._before if head == 'gone' else head}"
            if not wait.goes_on(f"{what}; waiting for it (trainer.nodes_within)"):
                raise RayUnavailableError(f"{what}, after {in_words(self._trainer.nodes_within)}", _NO_HEAD)
        return head == "here"

    def wait_for_token(self, asked: Asked) -> bool:
        """Wait until this node has a Ray auth token (it may be copied later), and check that the head accepts it.

        Returns False if the job ended or a signal arrived first.
        """
        enable_token()
        wait = Wait(self._trainer.nodes_within)
        while not has_token():
            if asked.by is not None or self._head() == "over":
                return False
            cause, remedy = missing_token()
            if not wait.goes_on(f"{cause}. {remedy} Waiting for it (trainer.nodes_within)"):
                raise RayUnavailableError(f"{cause}, after {in_words(self._trainer.nodes_within)}", remedy)
        check_token(f"{self._host}:{self._port}")
        return True

    def serve(self) -> bool:
        """Join the head that is there, and stay until it is gone or this node has died; False if the job is over."""
        address = f"{self._host}:{self._port}"
        allow_time(start_timeout(self._config.ray_init.start_timeout))
        logger.info("Joining the Ray head at %s as node %d...", address, self._trainer.node_rank)
        # By default Ray takes the address that leads to the internet, which other nodes may not reach.
        own_address = f"--node-ip-address={address_towards(self._host, self._port)}"
        self._process = process = _start_ray(f"--address={address}", own_address, *_cpus(self._config))
        start, own = time.monotonic(), OwnRay()
        while (head := self._head(serving=True)) == "here" and process.poll() is None and own.lost() is None:
            own = OwnRay(
                with_descendants(process.pid)
            )  # the command itself does not notice a raylet that was asked to end
            time.sleep(_LOOK_S)
        self.end()
        self._before = "is gone"
        if head == "here":
            self._count_death(time.monotonic() - start)
        return head != "over"

    def end(self) -> None:
        """End what serves."""
        if self._process is not None:
            _end(self._process, f"{self._host}:{self._port}")

    def _head(self, serving: bool = False) -> str:
        """Here, gone, over, or what answers in its place; one that starts may answer oddly.

        While we serve, only a closed port says that it is gone: Ray judges of a slow network.
        """
        try:
            stranger = find_foreign_service(self._host, self._port)
        except OSError as error:
            return "here" if serving and not isinstance(error, ConnectionRefusedError) else "gone"
        if stranger is not None and _OVER in stranger:
            return "over"
        return "here" if stranger is None or serving else f"does not answer, but {stranger}"

    def _count_death(self, served: float) -> None:
        self._deaths = 1 if served > self._trainer.nodes_within else self._deaths + 1
        limit = self._trainer.max_restarts
        if self._deaths > limit:
            raise RayUnavailableError(f"this node died {self._deaths} times (trainer.max_restarts = {limit})", _DIES)
        logger.warning("this node's Ray died: starting it again (%d of %d)", self._deaths, limit)


def _say_farewell(head: Head) -> None:
    """Answer whoever asks at the port that was the head's, until every node has, or for a while."""
    deadline = time.monotonic() + _FAREWELL_S
    try:
        with _door(head, deadline) as door:
            left = head.nodes - 1
            while left:
                door.settimeout(max(0.01, deadline - time.monotonic()))
                with door.accept()[0] as client:
                    left -= _heard(client)
    except TimeoutError:
        logger.warning("not every node has asked whether the job is over: those left wait for another head")
    except OSError as error:
        logger.warning("the other nodes cannot be told that the job is over, and wait for another head: %s", error)


def _door(head: Head, deadline: float) -> socket.socket:
    """At the head's port, once what was killed has let go of it."""
    while True:
        try:
            return socket.create_server((head.host, head.port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _heard(client: socket.socket) -> bool:
    """Tell it; whether it is a node. Clients of Ray come too, some more than once: they greet at length, or never."""
    with contextlib.suppress(OSError):
        client.settimeout(_LOOK_S)
        client.sendall(f"{_OVER}\n".encode())
        client.shutdown(socket.SHUT_WR)
        return client.recv(512) == HTTP2_PREFACE
    return False


def _wait_until_free(host: str, port: int) -> None:
    """A head that dies with the process that started it may take a moment; anything else at the port is an error."""
    deadline = time.monotonic() + _FREED_S
    while port_in_use(port):
        try:
            stranger = find_foreign_service(host, port)
        except OSError:
            stranger = _ELSEWHERE
        if stranger not in (None, _ELSEWHERE) or time.monotonic() > deadline:
            raise RayUnavailableError(*_taken(host, port, stranger))
        time.sleep(_LOOK_S)


def _taken(host: str, port: int, stranger: str | None) -> tuple[str, str]:
    """Cause and remedy where `trainer.master_port` is not free for our head."""
    if stranger is None:
        return f"trainer.master_port = {port}: a Ray head runs at {host}:{port} already", STALE
    remedy = "Set another trainer.master_port on all nodes, or end what is there."
    return f"trainer.master_port = {port}: at {host} answers {stranger}, not a Ray head", remedy


def _start_ray(*arguments: str, stdout: int | None = None) -> subprocess.Popen:
    """A `ray start` that lives as long as its node, which signals to our group do not reach and which dies with us."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    return subprocess.Popen(command, stdout=stdout, start_new_session=True, preexec_fn=die_with_parent)


def _end(process: subprocess.Popen, address: str) -> None:
    """End a `ray start` with all it started, and the note by which other commands here would join its cluster."""
    kill_tree(process.pid)
    process.wait()
    forget_cluster(address)


def _cpus(config: PPOConfig) -> list[str]:
    return [] if config.ray_init.num_cpus is None else [f"--num-cpus={config.ray_init.num_cpus}"]
