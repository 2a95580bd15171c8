"""The example script for Megatron, run as users do: tiny model and data, half of each size, CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.training_harness import make_task, overrides
from verl.utils.checkpoint.manifest import find_problems

ACTOR, CRITIC = "actor_rollout_ref.actor.megatron_config", "critic.megatron_config"
# TP 4 x PP 2 on eight ranks becomes TP 2 x PP 2 on four, beside a critic of TP 2.
SMALLER = (
    f"{ACTOR}.tensor_model_parallel_size=2",
    f"{CRITIC}.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
    "trainer.n_gpus_per_node=4",
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "ray_init.num_cpus=8",
)


@pytest.mark.timeout(1200)
def test_the_script_trains_validates_and_saves(tmp_path):
    task = make_task(tmp_path)
    script = ["bash", str(ROOT / "examples/ppo_trainer/run_qwen2-7b_math_megatron.sh")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*script, *overrides(task, tmp_path, *SMALLER)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (metrics,) = (path for path in tmp_path.rglob("metrics.jsonl") if path.parent.name != "record")
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert [record["actor/grad_norm"] > 0 and record["critic/grad_norm"] > 0 for record in records] == [True, True]
    assert any(name.startswith("val/") for name in records[-1])
    assert find_problems(tmp_path / "checkpoints" / "global_step_2") == []
