"""A Ray cluster that runs already: what is missing is waited for with words; a driver that is killed gives all back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator

import pytest

from verl.utils.network import own_address
from verl.utils.process_tree import kill_tree

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Four GPUs that only Ray believes in, held until the process ends.
HOLDS = """
    import ray, sys, time
    from verl.single_controller.ray import RayResourcePool

    ray.init(log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([4])
    groups = pool.get_placement_groups()
    print("held", flush=True)
    time.sleep(300)
"""
WAITS = """
    import logging, sys
    from types import SimpleNamespace

    import ray
    from verl.trainer.recovery.ray_monitor import RayUnavailableError
    from verl.trainer.common.ray_cluster import wait_for_nodes

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    ray.init(log_to_driver=False, logging_level="ERROR")
    pool, again, within = eval(sys.argv[1])
    try:
        wait_for_nodes(SimpleNamespace(device="cuda", nodes_within=within), [pool], again)
        print("returned")
    except RayUnavailableError as error:
        print(error)
"""


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of a cluster with one node, on which Ray counts four GPUs."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"{own_address()}:{probe.getsockname()[1]}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        found = inherited | {"RAY_ADDRESS": address, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        options = ["--num-cpus=2", "--num-gpus=4", "--object-store-memory=100000000", "--block", "--head"]
        options += [f"--port={address.partition(':')[2]}", "--include-dashboard=false"]
        head = subprocess.Popen([*RAY, "start", *options], env=found, stdout=subprocess.DEVNULL, start_new_session=True)
        yield found
        kill_tree(head.pid)
        head.wait()


def start(program: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_what_a_killed_driver_held_is_waited_for_and_comes_back(environment):
    for _ in range(60):
        holder = start(HOLDS, environment)
        if holder.stdout.readline() == "held\n":
            break
        holder.kill()
        time.sleep(1)  # the head is not there yet
    waiting = start(WAITS, environment, repr(([4], False, 120)))
    said = waiting.stdout.readline()
    assert said == "1 of 1 nodes, 0 of 4 GPUs: waiting for the others (trainer.nodes_within), 2 minutes left\n"
    holder.kill()
    killed = time.monotonic()
    rest, _ = waiting.communicate()
    assert rest == "returned\n"
    assert time.monotonic() - killed < 100

    never = start(WAITS, environment, repr(([8], False, 120)))
    assert never.communicate()[0] == "returned\n", "nothing to wait for: what places ranks says so at once"
    later = start(WAITS, environment, repr(([8], True, 1)))
    assert "1 of 1 nodes, 4 of 8 GPUs after 1 s" in later.communicate()[0], "it had been enough once"
    late = start(WAITS, environment, repr(([4, 4], False, 120)))
    assert late.stdout.readline().startswith("1 of 2 nodes, 4 of 8 GPUs: waiting for the others")
    joins = ["--num-cpus=2", "--num-gpus=4", "--object-store-memory=100000000", "--block"]
    address = environment["RAY_ADDRESS"]
    node = subprocess.Popen(
        [*RAY, "start", f"--address={address}", *joins],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert late.communicate()[0] == "returned\n"
    finally:
        kill_tree(node.pid)
        node.wait()
