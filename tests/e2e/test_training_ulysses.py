"""Runs with Ulysses sequence parallelism equal one rank: PPO with all roles, and SFT (slow)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import STEADY_EPS, save_tiny_model, tiny_config, tiny_tokenizer
from tests.support.training_harness import STEADY, make_task, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ACTOR = "actor_rollout_ref.actor"
SIZE = "ulysses_sequence_parallel_size"
SAME = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/mean", "actor/entropy")


def save_judge(folder: Path) -> Path:
    """A decoder that scores."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(tiny_config("qwen2", num_labels=1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("cut", ["fixed", "dynamic"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_roles_over_shared_sequences_give_the_results_of_one_rank(tmp_path, ray_cluster, ranks, cut):
    """Four ranks are two groups of two; actor, reference, critic and reward model share."""
    task, judge = make_task(tmp_path / "task"), save_judge(tmp_path / "judge")
    common = [*STEADY, f"{ACTOR}.use_kl_loss=True", "data.val_files=[]", "reward_model.enable=True"]
    common += [f"reward_model.path={judge}", f"{ACTOR}.use_dynamic_bsz={cut == 'dynamic'}"]
    common += [f"{ACTOR}.ppo_max_token_len_per_gpu=64", "critic.ppo_max_token_len_per_gpu=64"]
    shared = [f"{block}.{SIZE}=2" for block in (ACTOR, "critic", "reward_model")]
    alone = run_training(overrides(task, tmp_path / "one", *common)).history
    together = run_training(
        overrides(task, tmp_path / "more", *common, *shared, f"trainer.n_gpus_per_node={ranks}"), RayWorkerGroup
    ).history
    assert len(alone) == len(together) == 2
    for one, more in zip(alone, together, strict=True):
        for name in SAME:
            assert more[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
        assert more["rollout_corr/log_prob_diff_max"] < 1e-4, "the engine has the weights of all ranks"


def test_supervised_ranks_that_share_rows_learn_what_one_learns(tmp_path, monkeypatch, ray_cluster):
    from verl.config import SFTConfig, load_config
    from verl.trainer.main_sft import run_sft

    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": f"Count to {i}. " * (1 + i % 3), "response": " ".join(map(str, range(i + 1)))} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for ranks in (1, 2):
        config = {
            "data": {
                "train_files": "rows.jsonl",
                "val_files": "rows.jsonl",
                "train_batch_size": 4,
                "val_batch_size": 3,
                "micro_batch_size_per_gpu": 1,
                "max_length": 512,
            },
            "model": {"path": str(tmp_path / "tiny")},
            "optim": {"lr": 1e-3, "eps": STEADY_EPS},
            SIZE: ranks,
            "trainer": {
                "n_gpus_per_node": ranks,
                "device": "cpu",
                "total_epochs": 2,
                "experiment_name": str(ranks),
                "logger": "file",
            },
        }
        run_sft(load_config(config, root=SFTConfig))
    one, two = (logged(tmp_path / "runs" / "verl" / name / "metrics.jsonl") for name in ("1", "2"))
    names = ("train/loss", "train/grad_norm", "train/learned_tokens", "val/loss")
    for mine, theirs in zip(one, two, strict=True):
        assert [theirs.get(name) for name in names] == [
            value if value is None else pytest.approx(value, rel=1e-5) for value in map(mine.get, names)
        ]
    exported = Path("global_step_4") / "huggingface" / "model.safetensors"
    weights = [load_file(tmp_path / "checkpoints" / "verl" / name / exported) for name in ("1", "2")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=2e-6, msg=name)


def logged(file: Path) -> list[dict[str, float]]:
    return [json.loads(line)["data"] for line in file.read_text().splitlines()]
