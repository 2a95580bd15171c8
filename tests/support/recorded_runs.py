"""Small real runs of every kind, for tests that read their recordings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.training_harness import make_task, overrides, run_training
from verl.config import RMConfig, SFTConfig, load_config
from verl.trainer.main_rm import run_rm
from verl.trainer.main_sft import run_sft

RUNS = ("sync", "async", "agent", "sft", "rm")
_GRPO = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4")
_AGENT = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Lookup(AgentLoopBase):
    """An answer, the result of a tool, an answer."""
    async def run(self, sampling_params, **row):
        ids = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
        first = (await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)).token_ids[:3]
        result = self.tokenizer.encode("the key is 7", add_special_tokens=False)
        context = [*ids, *first, *result]
        call = {"prompt_ids": context, "sampling_params": sampling_params}
        last = (await self.server_manager.generate("r", **call)).token_ids[:2]
        mask = [1] * len(first) + [0] * len(result) + [1] * len(last)
        return AgentLoopOutput(ids, [*first, *result, *last], mask, extra_fields={"turn_names": ["lookup"]})
'''


def record_run(kind: str, folder: Path) -> Path:
    """Train a few steps of a run of this kind; return the folder with its recording."""
    task = make_task(folder / "task")
    if kind in ("sft", "rm"):
        return (record_sft if kind == "sft" else record_rm)(task["model"], folder)
    settings = {
        "sync": ("trainer.test_freq=1", "trainer.val_before_train=True"),
        "async": ("trainer.mode=one_step_off", "actor_rollout_ref.rollout.mode=async", "data.val_files=[]"),
        "agent": _agent_settings(folder),
    }[kind]
    run_training(overrides(task, folder, *_GRPO, "trainer.total_training_steps=3", *settings))
    return folder / "checkpoints"


def _agent_settings(folder: Path) -> tuple[str, ...]:
    (folder / "agent.py").write_text(_AGENT)
    return (
        f"actor_rollout_ref.rollout.agent.default_agent_loop={folder / 'agent.py'}:Lookup",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "data.max_response_length=32",
        "data.val_files=[]",
    )


def record_sft(model: str, folder: Path, *settings: str) -> Path:
    """Fine-tune 4 steps on 16 conversations with two assistant turns each; the loss covers both turns."""
    rows = [{"messages": _conversation(i, j)} for i in range(4) for j in range(4)]
    run_sft(load_config(None, _supervised(model, folder, rows, "data.multiturn=True", *settings), root=SFTConfig))
    return folder / "checkpoints"


def record_rm(model: str, folder: Path, *settings: str) -> Path:
    """Train a reward model 4 steps on 16 pairs, of which every fourth is a tie."""
    rows = [
        {"prompt": f"add {i} and {j}", "chosen": f"{i + j}", "rejected": f"not {i + j}, I think", "tie": j == 3}
        for i in range(4)
        for j in range(4)
    ]
    run_rm(load_config(None, _supervised(model, folder, rows, *settings), root=RMConfig))
    return folder / "checkpoints"


def _conversation(i: int, j: int) -> list[dict[str, str]]:
    texts = (f"add {i} and {j}", f"{i}+{j}={i + j}", "sure?", "yes")
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=True)]


def _supervised(model: str, folder: Path, rows: Sequence[Mapping[str, Any]], *settings: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows), ("val", rows[:4])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return [
        f"model.path={model}",
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/val.jsonl",
        "data.train_batch_size=4",
        "data.max_length=64",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.logger=[]",
        *settings,
    ]
