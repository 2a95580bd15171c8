"""Starting or joining Ray. Nothing here imports it before it is needed.

Either a cluster runs already (`ray start` on every node), or this machine alone is one, or `trainer.node_rank` says
which of several nodes this is: 0 starts the head and runs the job, the others join it and serve until it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from verl.config import PPOConfig
from verl.trainer.common.own_ray import OwnRay, started_apart
from verl.trainer.common.signals import stop_on_signals
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.exceptions import Travels
from verl.utils.process_tree import end_with_parent, kill_family

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0
# Ray protects a cluster with a token in the head's home folder. Nodes that do not share it need a copy of it, or
# RAY_AUTH_MODE=disabled everywhere; the user's own setting stands.
_AUTH_MODE = "token"
# How a client of HTTP/2 begins, which all of Ray's servers speak (gRPC): a preface, and settings without any entry.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4
_PATIENCE_S = 8.0
_STALE = "A stale cluster is the usual cause: run `ray stop`, then `ray start --head`, and try again."


class RayUnavailableError(Travels, RuntimeError):
    """Ray could not be started or joined; the message says what to run."""

    def __init__(self, reason: str, remedy: str = _STALE) -> None:
        super().__init__(f"Ray cannot start or join its cluster ({reason}). {remedy}")


def start_ray(num_cpus: int | None = None) -> OwnRay:
    """Join the cluster that runs here, or start one; what was started is returned."""
    import ray

    logger.info("Initializing Ray...")
    _check_cluster_answers(_known_cluster())
    runtime_env = get_ppo_ray_runtime_env()
    try:
        with started_apart() as pids:
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
    return OwnRay(pids)


def _known_cluster() -> str | None:
    """Address of the cluster that `ray.init` would join: the environment's, or the one noted by `ray start`."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    return _note().read_text().strip() if _note().is_file() else None


def _note() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")


def _check_cluster_answers(address: str | None) -> None:
    """Ray itself would wait for minutes for a cluster that is gone, or for a stranger's answer."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        stranger = stranger_at(host, int(port))
    except OSError as error:
        raise RayUnavailableError(f"nothing answers at {address}: {error}") from error
    if stranger is not None:
        source = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else f"the note {_note()}"
        raise RayUnavailableError(
            f"at port {port} of {host} answers {stranger}: not Ray",
            f"Correct {source}, or unset it and let the command start a Ray of its own (RAY_ADDRESS=local).",
        )


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
    node = _started_apart("start", f"--address={address}", "--block", *_cpus(config))
    # A scheduler stops all nodes at once: this one serves on while the head finishes its step.
    with stop_on_signals(lambda: None, lambda: kill_family(node.pid), "this node stays until the head has saved"):
        node.wait()
    logger.info("The head is gone: this node is done.")


def start_head(config: PPOConfig) -> subprocess.Popen | None:
    """With `trainer.node_rank=0`: start the head that the other nodes join. `stop_head` ends it."""
    trainer = config.trainer
    if trainer.node_rank != 0:
        return None
    os.environ.setdefault("RAY_AUTH_MODE", _AUTH_MODE)
    host = trainer.master_addr or "127.0.0.1"
    if is_taken(trainer.master_port):
        raise RayUnavailableError(*_taken(host, trainer.master_port))
    options = [f"--node-ip-address={host}", f"--port={trainer.master_port}"]
    # --block: the head is this command, so ending it ends this head and no other Ray of the machine.
    head = _started_apart("start", "--head", "--block", *options, *_cpus(config), stdout=subprocess.DEVNULL)
    try:
        _wait_for(host, trainer.master_port, alive=head)
    except BaseException:
        stop_head(head)
        raise
    os.environ["RAY_ADDRESS"] = f"{host}:{trainer.master_port}"
    return head


def running_head(config: PPOConfig, head: subprocess.Popen | None) -> subprocess.Popen | None:
    """The head so far, if it runs; else another, where there is one at all."""
    if head is not None and head.poll() is None:
        return head
    stop_head(head)
    return start_head(config)


def stop_head(head: subprocess.Popen | None) -> None:
    """End the head that this process started, and with it the nodes that joined."""
    if head is None:
        return
    head.terminate()
    try:
        head.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill_family(head.pid)
        head.wait()


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
    """Until a head answers there; a stranger at its port is told of at once."""
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        try:
            if stranger_at(host, port) is not None:
                raise RayUnavailableError(*_taken(host, port))
            return
        except OSError as error:
            if time.monotonic() > deadline or (alive is not None and alive.poll() is not None):
                raise RayUnavailableError(f"no head answers at {host}:{port}: {error}") from error
            time.sleep(1)


def _taken(host: str, port: int) -> tuple[str, str]:
    """Cause and remedy where `trainer.master_port` is not free for our head."""
    try:
        stranger = stranger_at(host, port)
    except OSError:
        stranger = "something else, on another address of this machine"
    if stranger is None:
        return f"trainer.master_port = {port}: a Ray head runs at {host}:{port} already", _STALE
    remedy = "Set another trainer.master_port on all nodes, or end what is there."
    return f"trainer.master_port = {port}: at {host} answers {stranger}, not a Ray head", remedy


def _started_apart(*arguments: str, stdout: int | None = None) -> subprocess.Popen:
    """A `ray` command that signals to our process group do not reach, and that does not outlive us."""
    return subprocess.Popen(_ray(*arguments), stdout=stdout, start_new_session=True, preexec_fn=end_with_parent)


def _ray(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def _cpus(config: PPOConfig) -> list[str]:
    return [] if config.ray_init.num_cpus is None else [f"--num-cpus={config.ray_init.num_cpus}"]


def stranger_at(host: str, port: int) -> str | None:
    """What answers at a port in Ray's place, in words; None if it may be Ray. OSError where nobody answers at all."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):  # encrypted: not to be told from outside
        socket.create_connection((host, port), timeout=5).close()
        return None
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.sendall(_HELLO)
            reply = connection.recv(512)
        except TimeoutError:
            return f"something that accepts connections and says nothing{_holder(host, port)}"
        except OSError as error:
            return f"something that closes connections ({error}){_holder(host, port)}"
    if len(reply) >= 4 and reply[3] == _SETTINGS_FRAME:
        return None
    return _described(reply) + _holder(host, port)


def is_taken(port: int) -> bool:
    """Whether a process of this machine listens at the port already, on any of its addresses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _described(reply: bytes) -> str:
    if not reply:
        return "something that closes connections"
    lines = reply.decode("latin-1").splitlines()
    if lines[0].startswith(("HTTP/", "<!DOCTYPE", "<html")):
        server = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("server:")), "")
        return f"an HTTP server{f' ({server})' if server else ''}"
    return f"something that says {lines[0][:60]!r}"


def _holder(host: str, port: int) -> str:
    """The process behind a port of this machine, as far as we may see it."""
    with contextlib.suppress(OSError):
        if socket.gethostbyname(host) not in {"127.0.0.1", *socket.gethostbyname_ex(socket.gethostname())[2]}:
            return ""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for fields in map(str.split, Path(table).read_text().splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port  # 0A: it listens
    }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) == f"socket:[{inode}]" for link in (process / "fd").iterdir() for inode in inodes):
                return f", process {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""
