"""Supervised fine-tuning on the Megatron engine gives the run of FSDP's, whichever way the ranks share the model."""

from __future__ import annotations

import json

import pytest

from tests.support.tiny import STEADY_EPS, save_tiny_model
from verl.config import SFTConfig, load_config
from verl.trainer.main_sft import run_sft

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]
NAMES = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "train/learned_tokens")


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=["one rank", "tensor", "pipeline", "context"],
)
def test_the_run_is_that_of_fsdp(tmp_path, monkeypatch, request, sizes):
    """With a weight below 1, packed, in passes of different numbers of rows."""
    if sizes:
        request.getfixturevalue("ray_cluster")
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {i}. " * (1 + i % 3)},
                {"role": "assistant", "content": " ".join(map(str, range(i + 1))), "loss": 0.5 if i % 2 else 1},
            ]
        }
        for i in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for strategy in ("fsdp2", "megatron"):
        config = {
            "data": {
                "train_files": "rows.jsonl",
                "val_files": "rows.jsonl",
                "train_batch_size": 4,
                "use_dynamic_bsz": True,
                "max_token_len_per_gpu": 256,
                "max_length": 256,
            },
            "model": {"path": str(tmp_path / "tiny")},
            "optim": {"lr": 1e-3, "eps": STEADY_EPS},
            "strategy": strategy,
            "trainer": {"n_gpus_per_node": 1, "device": "cpu", "total_epochs": 2, "logger": "file"},
        }
        config["trainer"]["experiment_name"] = strategy
        if strategy == "megatron" and sizes:
            config["megatron_config"] = sizes
            config["trainer"]["n_gpus_per_node"] = 2
        run_sft(load_config(config, root=SFTConfig))
    runs = [
        [
            json.loads(line)["data"]
            for line in (tmp_path / "runs/verl" / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("fsdp2", "megatron")
    ]
    for fsdp, megatron in zip(*runs, strict=True):
        assert megatron.keys() & set(NAMES) == fsdp.keys() & set(NAMES)
        for name in fsdp.keys() & set(NAMES):
            assert megatron[name] == pytest.approx(fsdp[name], rel=1e-4), name
