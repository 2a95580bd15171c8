"""Two machines on one: network namespaces with addresses of their own, and a folder of Ray's own in each."""

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

# Of the account that runs the tests: a new one has none of them.
_RAYS_OWN = ("RAY_ADDRESS", "RAY_AUTH_")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Ray keeps the address of its node in its folder, which two machines do not share.
_OWN_FOLDER = 'mount -t tmpfs none "$RAY_TMPDIR" && exec "$@"'


def are_possible() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True).returncode == 0


class TwoNodes:
    """Start a program on either, and kill all that runs there."""

    def __init__(self, names: list[str], ray_folder: str) -> None:
        self._names, self._ray_folder = names, ray_folder

    def start(self, node: int, folder: Path, *arguments: str, home: str = "home") -> subprocess.Popen:
        """`python -m verl.trainer.main_ppo` there; its output is added to `folder/node<N>.log`.

        `home`: the home folder in `folder`, shared by both nodes by default. No Ray auth token is set.
        """
        (folder / home).mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_RAYS_OWN)}
        environment |= {"RAY_TMPDIR": self._ray_folder, "HOME": str(folder / home)}
        command = ["ip", "netns", "exec", self._names[node], "unshare", "-m", "sh", "-c", _OWN_FOLDER, "sh"]
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
        """What runs there; only those of a name, if one is given."""
        listed = subprocess.run(["ip", "netns", "pids", self._names[node]], capture_output=True, text=True, check=True)
        pids = [int(pid) for pid in listed.stdout.split()]
        return pids if name is None else [pid for pid in pids if _name(pid) == name]

    def kill(self, node: int, name: str | None = None) -> None:
        for pid in self.processes(node, name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Both, connected to each other and to nothing else; whatever runs there ends with the block."""
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
