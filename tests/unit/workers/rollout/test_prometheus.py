"""What a replica tells a Prometheus server."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
import torch.distributed as dist

from verl.config import load_config
from verl.types.request import Request, SamplingParams
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.rollout.base import Load
from verl.workers.rollout.prometheus import exposition, serve_metrics


@pytest.fixture
def engine_name() -> str:
    return "native"


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


def test_counts_follow_the_requests_and_the_weights(start):
    rollout = start(ignore_eos=True)
    port = serve_metrics(rollout, replica=3, port=0)
    rollout.pause_generation()
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    futures = rollout.submit([Request(str(number), [5, 6, 7], params) for number in range(2)])
    found = read(port)
    assert found["verl_rollout_requests_waiting"] == 2
    assert found["verl_rollout_requests_running"] == found["verl_rollout_generated_tokens_total"] == 0
    assert found["verl_rollout_kv_cache_used"] == 0
    assert found["verl_rollout_weight_bytes"] > 0
    rollout.resume_generation()
    assert [len(future.result().token_ids) for future in futures] == [9, 9]
    rollout.update_weights([(name, tensor.clone()) for name, tensor in rollout.weights.items()], version=4)
    rollout.release()
    found = read(port)
    assert (found["verl_rollout_generated_tokens_total"], found["verl_rollout_weight_version"]) == (18, 4)
    assert found["verl_rollout_requests_waiting"] == found["verl_rollout_kv_cache_bytes"] == 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30)


def test_a_port_that_is_taken_is_named(start):
    rollout = start()
    port = serve_metrics(rollout, replica=0, port=0)
    with pytest.raises(ValueError, match=rf"^prometheus\.port: {port} of replica 1\b"):
        serve_metrics(rollout, replica=1, port=port)


def test_the_text_has_types_labels_and_only_what_is_known():
    assert exposition(Load(generated_tokens_total=12345678, weight_version=2), {"engine": "hf", "replica": "0"}) == (
        "# HELP verl_rollout_generated_tokens_total Tokens sampled since the engine was started.\n"
        "# TYPE verl_rollout_generated_tokens_total counter\n"
        'verl_rollout_generated_tokens_total{engine="hf",replica="0"} 12345678\n'
        "# HELP verl_rollout_weight_version Version of the current weights.\n"
        "# TYPE verl_rollout_weight_version gauge\n"
        'verl_rollout_weight_version{engine="hf",replica="0"} 2\n'
    )


def test_a_replica_of_a_run_serves_where_the_configuration_says(model_path):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    serving = ("enable=True", f"port={port}")
    keys = [f"actor_rollout_ref.rollout.prometheus.{key}" for key in serving]
    paths = ["data.train_files=x", f"actor_rollout_ref.model.path={model_path}", "trainer.device=cpu"]
    config = load_config(None, [*paths, *keys], check_files=False)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "rollout")
    worker.init_model()
    try:
        assert read(port)["verl_rollout_requests_running"] == 0
    finally:
        worker.rollout.close()
        if dist.is_initialized():
            dist.destroy_process_group()
