"""Reward-model training on several ranks on Ray equals training on one rank."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import STEADY_EPS, save_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

# Nine answers to the first four prompts: they do not divide over two ranks, and three of one may be torn.
ROWS = [
    {"prompt": "one", "chosen": "a good answer", "rejected": "a bad one"},
    {"prompt": "one", "chosen": "a bad one", "rejected": "none at all, said at length", "margin": 0.5},
    *({"prompt": f"{i} more", "chosen": "yes " * i, "rejected": "no " * (5 - i), "weight": i} for i in range(1, 4)),
    *({"prompt": f"say {i}", "chosen": f"{i}", "rejected": f"not {i}"} for i in range(4)),
]


def test_two_ranks_learn_what_one_learns_whether_they_divide_answers_or_tokens(tmp_path, monkeypatch, ray_cluster):
    from verl.config import RMConfig, load_config
    from verl.trainer.main_rm import run_rm

    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    layouts = {"one": (1, 1, 2), "torn": (2, 1, 2), "whole": (2, 1, 4), "ulysses": (2, 2, 2)}
    for name, (ranks, sharing, micro) in layouts.items():
        config = {
            "data": {
                "train_files": "pairs.jsonl",
                "val_files": "pairs.jsonl",
                "train_batch_size": 4,
                "val_batch_size": 3,
                "micro_batch_size_per_gpu": micro,
                "max_length": 64,
                "shuffle": False,
            },
            "model": {"path": str(tmp_path / "tiny")},
            "optim": {"lr": 1e-2, "eps": STEADY_EPS},
            "ulysses_sequence_parallel_size": sharing,
            "trainer": {
                "n_gpus_per_node": ranks,
                "device": "cpu",
                "total_epochs": 2,
                "save_freq": 0,
                "experiment_name": name,
                "logger": "file",
            },
        }
        run_rm(load_config(config, root=RMConfig))
    runs = [logged(tmp_path / "runs" / "verl" / name) for name in layouts]
    assert runs[0][1]["train/answers"] == 9
    names = ("train/loss", "train/grad_norm", "train/margin", "val/loss", "val/length_correlation")
    for one, *others in zip(*runs, strict=True):
        for other in others:
            assert [one[name] for name in names if name in one] == pytest.approx(
                [other[name] for name in names if name in other], rel=1e-4, abs=1e-6
            )
    first, *rest = (
        load_file(tmp_path / "checkpoints" / "verl" / name / "global_step_4" / "huggingface" / "model.safetensors")
        for name in layouts
    )
    for weights in rest:
        for name, weight in first.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5, msg=name)


def logged(folder):
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
