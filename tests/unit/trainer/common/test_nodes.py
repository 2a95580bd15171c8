"""A node and its head's port: told that the job is over, it ends; left alone, it waits for so long and says so."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from verl.config import PPOConfig, load_config
from verl.trainer.common import nodes, ray_cluster
from verl.trainer.common.nodes import RayHead, serve_as_node, start_head, stop_head
from verl.trainer.recovery.ray_monitor import RayUnavailableError


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def head(port) -> Iterator[RayHead]:
    """One that ends at once; what it answers while it lives is Ray's matter."""
    process = subprocess.Popen(["sleep", "100"], start_new_session=True)
    yield RayHead(process, "127.0.0.1", port, nodes=2)
    process.kill()
    process.wait()


def node(port: int, within: float) -> PPOConfig:
    given = {
        "data": {"train_files": "openai/gsm8k"},
        "actor_rollout_ref": {"model": {"path": "a/b"}},
        "trainer": {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": port},
    }
    return load_config(given, [f"trainer.nodes_within={within}"], check_files=False)


def test_a_node_that_asks_after_the_end_hears_that_the_job_is_over(head, caplog):
    """The port may be free a moment later than its owner was killed. A client of Ray, which greets otherwise, or one
    that goes without a word is no node: the door stays open."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", head.port))
    ending = threading.Thread(target=stop_head, args=(head,))
    ending.start()
    threading.Timer(0.5, holder.close).start()
    for greeting in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40), b""):
        while ending.is_alive():
            try:
                with socket.create_connection(("127.0.0.1", head.port), timeout=5) as client:
                    client.sendall(greeting)
                break
            except ConnectionRefusedError:
                continue
    with caplog.at_level("INFO"):
        serve_as_node(node(head.port, within=30))
    ending.join(timeout=250)
    assert not ending.is_alive(), "every node knows: nobody is waited for any longer"
    assert head.process.returncode is not None
    assert "The job is over: this node is done." in caplog.text
    assert "not all nodes" not in caplog.text


def test_a_node_whose_head_never_comes_says_for_whom_it_waits_and_gives_up(port, caplog):
    with pytest.raises(RayUnavailableError, match=rf"127\.0\.0\.1:{port}\b.*\b1 s\)") as gave_up:
        serve_as_node(node(port, within=1.0))
    assert "trainer.node_rank=0" in str(gave_up.value)
    (said,) = [record.message for record in caplog.records if "waiting for it" in record.message]
    assert said == f"the head at 127.0.0.1:{port} does not answer yet; waiting for it (trainer.nodes_within), 1 s left"


def test_what_is_at_the_heads_port_is_named_and_waited_for(caplog):
    """A head that starts may answer oddly; a stranger stays."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with contextlib.suppress(OSError):  # it was closed
                while True:
                    other.accept()[0].sendall(b"220 mail.example\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RayUnavailableError, match=r"mail\.example"):
            serve_as_node(node(other.getsockname()[1], within=0.5))


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """The processes that `start_head` starts in place of Ray: the first ends at once, the second never answers."""
    processes: list[subprocess.Popen] = []

    def start(*arguments: str, stdout: int | None = None) -> subprocess.Popen:
        process = subprocess.Popen(["sleep", "100" if processes else "0"], start_new_session=True)
        if not processes:
            process.wait()  # also on a busy machine it ends before the timeout of the first attempt
        processes.append(process)
        return process

    for name in (*ray_cluster.LIMITS, ray_cluster.NO_CPP_STACKS, "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "5" * 64)
    monkeypatch.setattr(ray_cluster, "set_here", set())
    monkeypatch.setattr(nodes, "spawn_ray_start", start)
    monkeypatch.setattr(nodes, "POLL_S", 0.05)
    return processes


def head_of(port: int) -> PPOConfig:
    config = node(port, within=1.0)
    config.trainer.node_rank, config.ray_init.start_timeout = 0, 0.5
    return config


def test_a_head_that_does_not_start_is_tried_twice_within_the_configured_time(port, started, caplog):
    with pytest.raises(RayUnavailableError) as caught:
        start_head(head_of(port))
    assert [process.poll() is not None for process in started] == [True, True]
    assert f"the head at 127.0.0.1:{port} ended with code 0" in caplog.text
    assert f"two attempts of up to 0 s: no head answers at 127.0.0.1:{port}" in caught.value.reason
    assert "ray_init.start_timeout=1" in str(caught.value)
    assert "RAY_ADDRESS" not in os.environ


def test_a_head_that_starts_at_the_second_attempt_is_used(port, started, monkeypatch):
    monkeypatch.setattr(RayHead, "is_healthy", lambda self: self.process is started[-1] and len(started) == 2)
    head = start_head(head_of(port))
    assert head is not None
    assert head.process is started[1]
    assert os.environ["RAY_ADDRESS"] == f"127.0.0.1:{port}"
    head.process.kill()
    head.process.wait()
