"""The quick start's word problems for tests: fewer of them, a smaller model, warm-started here in seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
import task as quickstart

SMALL = {"hidden_size": 64, "intermediate_size": 128}
# Two rewards instead of one: right or not, and whether the answer has the form "… #### number".
REWARD_FILE = """
from verl.utils.reward_score import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = gsm8k.compute_score(solution_str, ground_truth)
    return {"score": right, "acc": right == 1.0, "format": float("####" in solution_str)}
"""


def make_quickstart(folder: Path, steps: int = 150, train: int = 512, val: int = 64) -> dict[str, str]:
    """Problems, reward and a model that has seen `steps` batches of the hasty teacher's answers; paths by name."""
    before = dict(quickstart.MODEL)
    quickstart.MODEL.update(SMALL)
    try:
        files = quickstart.make_task(folder, rows={"sft": 4000, "train": train, "val": val})
    finally:
        quickstart.MODEL.update(before)
    warm_start(files["model"], pq.read_table(files["sft"]).to_pylist(), steps)
    (folder / "reward.py").write_text(REWARD_FILE)
    return {name: str(path) for name, path in files.items()} | {"reward": str(folder / "reward.py")}


def warm_start(model_path: Path, rows: list[dict[str, str]], steps: int) -> None:
    """Supervised training in place, plain and on one thread."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path).train()
    texts = [f"<|user|> {row['prompt']} <|assistant|> {row['response']} <|end|>" for row in rows]
    tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = tokens.input_ids.masked_fill(tokens.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, len(texts), (64,), generator=order)
        inputs = {"input_ids": tokens.input_ids[chosen], "attention_mask": tokens.attention_mask[chosen]}
        model(**inputs, labels=labels[chosen]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(model_path)


def overrides(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    """The command line of a small run on the in-process controller."""
    return [
        f"data.train_files={task['train']}",
        f"data.val_files={task['val']}",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={task['model']}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.model.enable_gradient_checkpointing=False",
        f"custom_reward_function.path={task['reward']}",
        "reward_model.reward_kwargs={num_processes: 0}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.log_val_generations=0",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
        *more,
    ]
