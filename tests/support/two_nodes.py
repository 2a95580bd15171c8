"""Two simulated machines: network namespaces with separate addresses and Ray folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Removed from the environment of the tests.
_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Ray stores the address of its node in its folder, so each machine needs its own.
_PRIVATE_FOLDER = 'mount -t tmpfs none "$RAY_TMPDIR" && exec "$@"'


def two_nodes_supported() -> bool:
    """Whether this process may create network namespaces."""
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True).returncode == 0


class TwoNodes:
    """Start a training on either node, list and kill the processes of a node."""

    def __init__(self, names: list[str], ray_folder: str) -> None:
        self._names, self._ray_folder = names, ray_folder

    def start(self, node: int, folder: Path, *arguments: str, home: str = "home") -> subprocess.Popen:
        """Start `python -m verl.trainer.main_ppo` on a node; append its output to `folder/node<N>.log`.

        `home`: the home folder in `folder`, shared by both nodes by default. No Ray auth token is set.
        """
        (folder / home).mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_RAY_VARIABLES)}
        environment |= {"RAY_TMPDIR": self._ray_folder, "HOME": str(folder / home)}
        command = ["ip", "netns", "exec", self._names[node], "unshare", "-m", "sh", "-c", _PRIVATE_FOLDER, "sh"]
        command += [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        command += [f"trainer.node_rank={node}", f"trainer.master_addr={ADDRESSES[0]}", "trainer.nnodes=2"]
        with (folder / f"node{node}.log").open("a") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def processes(self, node: int, name: str | None = None) -> list[int]:
        """Processes of a node; only those with this command name, if given."""
        process = subprocess.run(["ip", "netns", "pids", self._names[node]], capture_output=True, text=True, check=True)
        pids = [int(pid) for pid in process.stdout.split()]
        return pids if name is None else [pid for pid in pids if _name(pid) == name]

    def kill(self, node: int, name: str | None = None) -> None:
        for pid in self.processes(node, name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Two nodes that can reach only each other; their processes are killed when the block ends."""
    names = [f"verl{os.getpid()}{letter}" for letter in "ab"]
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        nodes = TwoNodes(names, folder)
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
            yield nodes
        finally:
            for node, name in enumerate(names):
                if Path("/run/netns", name).exists():
                    nodes.kill(node)
                    time.sleep(0.2)
                    _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
