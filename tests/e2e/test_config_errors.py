"""`python -m verl.trainer.main_ppo` with invalid keys: all problems with remedies, exit code 2, no files left."""

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

FIVE_MISTAKES = [
    "data.train_files=~/no/such/train.parquet",
    "data.train_batch_size=256",
    "actor_rollout_ref.model.path=.",
    "actor_rollout_ref.actor.ppo_mini_batch_size=100",
    "actor_rollout_ref.rollout.temprature=0.7",
    "actor_rollout_ref.actor.optim.lr=fast",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=1",
]


def run(*arguments, cwd, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_ADDRESS": "local"} | environment
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture
def valid(tmp_path):
    """Arguments of a run that passes every check before Ray is started."""
    (tmp_path / "config.json").write_text("{}")
    row = {"prompt": "1 + 1", "data_source": "openai/gsm8k", "ground_truth": "2"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    sizes = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    return [f"data.train_files={tmp_path}/rows.jsonl", f"actor_rollout_ref.model.path={tmp_path}", *sizes]


def test_five_mistakes_are_five_numbered_problems(tmp_path):
    done = run(*FIVE_MISTAKES, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line[:2] for line in lines[1:]] == ["1.", "2.", "3.", "4.", "5."]
    keys = {re.match(r"\d\. (\S+) = ", line).group(1) for line in lines[1:]}
    assert keys == {
        "data.train_files",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.rollout.temprature",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.rollout.n",
    }
    assert list(tmp_path.iterdir()) == []  # Hydra left nothing behind


def test_a_yaml_with_some_blocks_is_enough_and_groups_lie_under_it(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "data: {train_files: 's3://bucket/data.parquet'}\n"
        "algorithm: {lam: 0.5}\n"
        "actor_rollout_ref:\n"
        "  model: {path: .}\n"
        "  actor: {ppo_mini_batch_size: 100, max_grad_norm: 0.3}\n"
        "critic: null\n"
    )
    done = run("--config-path", ".", "--config-name", "mine", "algorithm=grpo", "+custom.x=1", cwd=tmp_path)
    assert done.returncode == 2
    (problem,) = done.stderr.splitlines()[1:]
    assert problem.startswith("1. actor_rollout_ref.actor.ppo_mini_batch_size = 100")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_yaml_may_build_on_ours_by_a_defaults_list(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_files: openai/gsm8k, train_batch_size: 100}\n"
    )
    done = run(f"--config-path={tmp_path}", "-cn", "mine", "algorithm=grpo", "critic=megatron", cwd=tmp_path)
    assert done.returncode == 2
    assert "actor_rollout_ref.actor.ppo_mini_batch_size = 128" in done.stderr
    assert "actor_rollout_ref.model.path = null: is required" in done.stderr


def test_the_composed_configuration_is_shown_by_cfg_job_in_the_middle_of_the_line(tmp_path):
    done = run("algorithm=grpo", "--cfg", "job", "trainer.nnodes=3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "adv_estimator: grpo" in done.stdout
    assert "nnodes: 3" in done.stdout


def test_a_stale_cluster_is_recognised_at_once(tmp_path, valid):
    done = run(*valid, cwd=tmp_path, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "nothing answers at 127.0.0.1:1" in last
    assert "run `ray stop`, then `ray start --head`" in last


@pytest.mark.slow
def test_a_stranger_at_the_port_of_ray_is_told_of_soon(tmp_path, valid):
    """An HTTP server, and one that accepts and says nothing, where RAY_ADDRESS or trainer.master_port points."""
    as_head = ["trainer.node_rank=0", "trainer.nnodes=2", "trainer.master_addr=127.0.0.1"]
    with (
        http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as web,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        threading.Thread(target=web.serve_forever, daemon=True).start()
        quiet_port = silent.getsockname()[1]
        last_lines = []
        for arguments, address in (
            ([], f"127.0.0.1:{web.server_port}"),
            ([], f"127.0.0.1:{quiet_port}"),
            ([*as_head, f"trainer.master_port={web.server_port}"], "local"),
        ):
            start = time.monotonic()
            done = run(*valid, *arguments, cwd=tmp_path, RAY_ADDRESS=address)
            assert time.monotonic() - start < 100, "the verdict takes at most 15 s; the rest is this machine's start"
            assert done.returncode == 1, done.stderr
            last_lines.append(done.stderr.splitlines()[-1])
        web.shutdown()
    assert f"at port {web.server_port} of 127.0.0.1 answers an HTTP server" in last_lines[0]
    assert (
        f"at port {quiet_port} of 127.0.0.1 answers something that accepts connections and sends nothing"
        in last_lines[1]
    )
    assert "not Ray). Correct RAY_ADDRESS" in last_lines[1]
    assert re.search(rf"trainer.master_port = {web.server_port}: .*127\.0\.0\.1 .*an HTTP server", last_lines[2])
    assert "Set another trainer.master_port" in last_lines[2]
    if sys.platform == "linux":
        assert all(f"(pid {os.getpid()})" in line for line in last_lines)
