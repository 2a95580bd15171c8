"""The task of examples/quickstart for tests: fewer problems, a smaller model, a short supervised warm start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tests.support import training_harness

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
import task as quickstart

SMALL = {"hidden_size": 64, "intermediate_size": 128}
# Two rewards: correctness, and whether the response has the form "… #### number".
REWARD_FILE = """
from verl.utils.reward_score import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = gsm8k.compute_score(solution_str, ground_truth)
    return {"score": score, "acc": score == 1.0, "format": float("####" in solution_str)}
"""


def make_quickstart(folder: Path, steps: int = 150, train: int = 512, val: int = 64) -> dict[str, str]:
    """Write data, reward and a model trained on `steps` batches of imperfect demonstrations; return paths by name."""
    original = dict(quickstart.MODEL)
    quickstart.MODEL.update(SMALL)
    try:
        files = quickstart.make_task(folder, rows={"sft": 4000, "train": train, "val": val})
    finally:
        quickstart.MODEL.update(original)
    warm_start(files["model"], pq.read_table(files["sft"]).to_pylist(), steps)
    (folder / "reward.py").write_text(REWARD_FILE)
    return {name: str(path) for name, path in files.items()} | {"reward": str(folder / "reward.py")}


def warm_start(model_path: Path, rows: list[dict[str, str]], steps: int) -> None:
    """Fine-tune the model in place with a plain PyTorch loop."""
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
    return training_harness.overrides(
        task,
        folder,
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.model.enable_gradient_checkpointing=False",
        "reward_model.reward_kwargs={num_processes: 0}",
        *more,
    )
