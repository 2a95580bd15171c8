"""The scripts for clusters run, with a scheduler, ssh and Python that note what they are asked; YAML is read."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import ROOT, compose_config

FOLDER = ROOT / "examples" / "cluster"
TRAIN = ROOT / "examples" / "grpo_trainer" / "run_qwen2-7b.sh"
PROGRAMS = {
    # Notes its arguments and the token; ends as asked, or when it is sent SIGTERM.
    "python3": """
        printf '%s\\0' "$RAY_AUTH_TOKEN" "$@" > "$NOTED/call.$$"
        if [ -n "${RUNS:-}" ]; then sleep 30 & trap 'kill $!; exit 0' TERM; wait; fi
        exit ${CODE:-0}
    """,
    "ssh": 'echo "$1" >> "$NOTED/hosts"; echo "$2" >> "$NOTED/commands"; exec bash -c "$2"',
    "scontrol": 'if [ "$1" = show ]; then printf "localhost\\nother\\n"; else echo "$@" > "$NOTED/requeued"; fi',
    # One task per node, all at once, and the worst exit code; signals go to the tasks.
    "srun": """
        shift
        pids=
        for node in 0 1; do SLURM_NODEID=$node "$@" & pids="$pids $!"; done
        trap 'kill -TERM $pids' TERM
        worst=0
        for pid in $pids; do
            while kill -0 $pid 2> /dev/null; do wait $pid; done
            wait $pid; code=$?
            if [ $code -gt $worst ]; then worst=$code; fi
        done
        exit $worst
    """,
}


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Of a shell in which these programs come first."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    for folder in (programs, home):
        folder.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    ours = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "NOTED": str(tmp_path), "TRAIN": str(TRAIN)}
    return {**os.environ, **slurm, **ours}


def start(script: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(["bash", FOLDER / script, *arguments], cwd=environment["NOTED"], env=environment)


def calls(folder: Path, number: int) -> tuple[set[str], list[Any]]:
    """The tokens, and the configurations by the nodes' ranks, of so many calls of python3."""
    deadline = time.monotonic() + 120
    while len(found := sorted(folder.glob("call.*"))) < number or not all(file.stat().st_size for file in found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    noted = [file.read_text().removesuffix("\0").split("\0") for file in found]
    configurations = [compose_config(arguments) for _, *arguments in noted]
    return {token for token, *_ in noted}, sorted(configurations, key=lambda config: config.trainer.node_rank or 0)


def test_slurm_starts_the_same_command_on_every_node(environment, tmp_path):
    assert start("slurm.sbatch", environment, "trainer.save_freq=7").wait() == 0
    tokens, (head, node) = calls(tmp_path, 2)
    assert len(tokens) == 1
    assert len(tokens.pop()) == 64
    for rank, config in enumerate((head, node)):
        trainer = config.trainer
        assert (trainer.node_rank, trainer.nnodes, trainer.n_gpus_per_node, trainer.save_freq) == (rank, 2, 4, 7)
        assert trainer.master_addr == "127.0.0.1"
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "again"), [(1, 0, True), (1, 3, False), (2, 0, False)], ids=["lost", "too often", "mistake"]
)
def test_slurm_queues_a_run_again_that_another_start_may_help(environment, tmp_path, code, restarts, again):
    environment |= {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts)}
    assert start("slurm.sbatch", environment).wait() == code
    assert (tmp_path / "requeued").exists() == again


def test_slurm_lets_a_run_save_before_its_time_is_over_and_queues_it_again(environment, tmp_path):
    job = start("slurm.sbatch", environment | {"RUNS": "1"})
    calls(tmp_path, 2)
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_options_of_the_slurm_job_leave_time_to_save_and_queue_it_again():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE))
    assert "requeue" in options
    assert options["open-mode"] == "append", "what the run said before it was queued again is kept"
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert options["ntasks-per-node"] == "1"


def test_ssh_starts_a_node_on_every_host_or_one_that_came_back(environment, tmp_path):
    environment |= {"HOSTS": "10.0.0.1 10.0.0.2"}
    keys = ["trainer.n_gpus_per_node=4", "trainer.experiment_name=a b"]
    assert start("ssh.sh", environment, "start", *keys).wait() == 0
    tokens, configurations = calls(tmp_path, 2)
    assert (tmp_path / "hosts").read_text().split() == ["10.0.0.1", "10.0.0.2"]
    assert tokens == {(tmp_path / "home/.ray/auth_token").read_text().strip()}
    assert (tmp_path / "home/.ray/auth_token").stat().st_mode & 0o077 == 0, "a secret"
    for token in tokens:
        assert token not in (tmp_path / "commands").read_text(), "every account of a machine can read command lines"
    for rank, config in enumerate(configurations):
        trainer = config.trainer
        assert (trainer.node_rank, trainer.nnodes, trainer.master_addr) == (rank, 2, "10.0.0.1")
        assert trainer.experiment_name == "a b"
    for file in tmp_path.glob("call.*"):
        file.unlink()
    assert start("ssh.sh", environment | {"NODE": "1"}, "start", *keys).wait() == 0
    again, (node,) = calls(tmp_path, 1)
    assert again == tokens
    assert node.trainer.node_rank == 1


def test_ssh_stops_node_0_which_tells_the_others(environment, tmp_path):
    environment |= {"HOSTS": "10.0.0.1", "RUNS": "1"}
    assert start("ssh.sh", environment, "start").wait() == 0
    calls(tmp_path, 1)
    pid = int((tmp_path / "cluster-node0.pid").read_text())
    os.kill(pid, 0)
    assert start("ssh.sh", environment, "stop").wait() == 0
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_ray_job_runs_what_its_cluster_has_room_for(environment, tmp_path):
    """Fields by their names in KubeRay's RayJob (ray.io/v1)."""
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"]
    script, *keys = shlex.split(spec["entrypoint"].removeprefix("bash /workspace/"))
    assert subprocess.run(["bash", ROOT / script, *keys], env=environment, cwd=tmp_path).returncode == 0
    _, (config,) = calls(tmp_path, 1)
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert config.trainer.node_rank is None, "the job has a cluster already"
    assert workers["replicas"] == config.trainer.nnodes
    assert int(workers["rayStartParams"]["num-gpus"]) == config.trainer.n_gpus_per_node
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
        assert Path(config.trainer.default_local_dir).is_relative_to(mounts["checkpoints"]), "a folder all pods share"
        named = {variable["name"] for variable in container["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_JOB_STOP_WAIT_TIME_S"} <= named
    assert pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == config.trainer.n_gpus_per_node
