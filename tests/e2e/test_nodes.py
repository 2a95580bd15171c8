"""Two nodes, one of which loses its processes during a run: the run restarts and finishes."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.training_harness import make_task, overrides
from tests.support.two_nodes import TwoNodes, two_nodes, two_nodes_supported

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not two_nodes_supported(), reason="makes network namespaces, as root"),
]
STEPS = 5


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as both:
        yield both


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def undisturbed(task, tmp_path_factory) -> bytes:
    """The weights that the run ends with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_nodes() as both:
        first, second = start(both, 0, task, folder), start(both, 1, task, folder)
        assert first.wait(timeout=300) == 0, log_text(folder)
        assert second.wait() == 0, log_text(folder, 1)
    assert "The job is over: this node is done." in log_text(folder, 1)
    return weights(folder)


def start(nodes: TwoNodes, node: int, task: dict[str, str], folder: Path, home: str = "home") -> subprocess.Popen:
    """One rank on each node."""
    more = (
        "algorithm.adv_estimator=grpo",
        "data.val_files=[]",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={STEPS}",
        "ray_init.num_cpus=2",
    )
    return nodes.start(node, folder, *overrides(task, folder, *more), home=home)


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"global_step_{STEPS}" / "actor/huggingface/model.safetensors").read_bytes()


def log_text(folder: Path, node: int = 0) -> str:
    return (folder / f"node{node}.log").read_text()


def wait_until(true: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline, log_text(folder)[-3000:]
        time.sleep(0.2)


def test_a_node_that_is_lost_and_comes_again(nodes, task, tmp_path, undisturbed):
    """Its command is given again, late: the run names the node, waits, and goes on from the last whole step."""
    first, lost = start(nodes, 0, task, tmp_path), start(nodes, 1, task, tmp_path)
    wait_until((tmp_path / "checkpoints" / "global_step_2").is_dir, tmp_path)
    nodes.kill(1)
    lost.wait()
    wait_until(lambda: "1 of 2 nodes: waiting for the others" in log_text(tmp_path), tmp_path)
    second = start(nodes, 1, task, tmp_path)
    assert first.wait(timeout=300) == 0, log_text(tmp_path)[-5000:]
    assert second.wait() == 0, log_text(tmp_path, 1)
    assert "restart 1 of 3" in log_text(tmp_path)
    assert names_the_lost_node(log_text(tmp_path))
    assert weights(tmp_path) == undisturbed
    assert [nodes.processes(0), nodes.processes(1)] == [[], []]


def names_the_lost_node(log: str) -> bool:
    """A call to the rank of the lost node fails, or, between calls, reading rows that it has stored."""
    lost_rank = "node 10.77.0.2 is lost, with rank 1 of actor_rollout"
    return lost_rank in log or "the process on 10.77.0.2 that stored them has ended" in log


def test_a_node_with_a_home_of_its_own_waits_for_a_copy_of_the_token(nodes, task, tmp_path, undisturbed):
    """An account without a Ray auth token: node 0 creates one, the other node names the file that it needs."""
    first, second = (start(nodes, node, task, tmp_path, home=f"home{node}") for node in (0, 1))
    token, copy = (tmp_path / f"home{node}" / ".ray" / "auth_token" for node in (0, 1))
    wait_until(lambda: "this node has no Ray auth token" in log_text(tmp_path, 1), tmp_path)
    assert str(copy) in log_text(tmp_path, 1)
    copy.parent.mkdir()
    shutil.copy(token, copy)
    assert first.wait(timeout=300) == 0, log_text(tmp_path)[-5000:]
    assert second.wait() == 0, log_text(tmp_path, 1)
    assert weights(tmp_path) == undisturbed
    assert f"Created a Ray auth token in {token}" in log_text(tmp_path)
    assert token.read_text() not in log_text(tmp_path) + log_text(tmp_path, 1)


@pytest.mark.parametrize(("node", "process"), [(0, "gcs_server"), (1, "raylet")])
def test_rays_own_processes_on_either_node(nodes, task, tmp_path, undisturbed, node, process):
    """Nobody touches anything: the head starts again and its node joins it; a node's Ray starts again."""
    first, second = start(nodes, 0, task, tmp_path), start(nodes, 1, task, tmp_path)
    wait_until((tmp_path / "checkpoints" / "global_step_2").is_dir, tmp_path)
    nodes.kill(node, process)
    assert first.wait(timeout=300) == 0, log_text(tmp_path)[-5000:]
    assert second.wait() == 0, log_text(tmp_path, 1)
    if node == 0:
        assert "the head at 10.77.0.1:29500 is gone; waiting for it" in log_text(tmp_path, 1)
    else:
        assert "Ray on this node died: starting it again (1 of 3)" in log_text(tmp_path, 1)
        assert names_the_lost_node(log_text(tmp_path))
    assert weights(tmp_path) == undisturbed
    assert [nodes.processes(0), nodes.processes(1)] == [[], []]
