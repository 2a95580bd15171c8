"""docs/agents.md: its tool, its rows and its command run as they stand there, with a tiny model and one step."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.tiny import save_tiny_model
from tests.support.training_harness import run_training

PAGE = (ROOT / "docs/agents.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMAND = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].replace("\\\n", " ").splitlines()
SMALL = [
    "data.train_batch_size=4",
    "data.max_prompt_length=1024",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[file]",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_the_reader_writes_is_under_forty_lines():
    own = [*FILES["my_tools.py"].splitlines(), *FILES["my_data.py"].splitlines(), *COMMAND]
    assert len([line for line in own if line.strip()]) < 40


def test_the_pages_files_and_command_train(folder):
    subprocess.run([sys.executable, *shlex.split(COMMAND[0])[1:]], check=True, cwd=folder)
    model = save_tiny_model(folder / "tiny", max_position_embeddings=2048)
    given = [word for word in shlex.split(COMMAND[1])[3:] if not word.startswith("actor_rollout_ref.model.path=")]
    own = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder / 'checkpoints'}"]
    trainer = run_training([*given, *SMALL, *own])
    assert trainer.history[-1]["num_turns/mean"] >= 1
    assert "tool_call_counts/mean" in trainer.history[-1]
    assert (folder / "conversations/1.jsonl").exists()


@pytest.mark.slow
def test_the_pages_loop_answers_twice(folder):
    subprocess.run([sys.executable, *shlex.split(COMMAND[0])[1:]], check=True, cwd=folder)
    model = save_tiny_model(folder / "tiny", max_position_embeddings=2048)
    loop = re.search(r"`(actor_rollout_ref\.rollout\.agent\.default_agent_loop=\S+)`", PAGE)[1]
    own = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder / 'checkpoints'}", loop]
    data = ["algorithm=grpo", "data.train_files=shop.parquet", "data.max_response_length=64"]
    trainer = run_training([*data, "actor_rollout_ref.rollout.mode=async", *SMALL, *own])
    assert trainer.history[-1]["num_turns/mean"] == 3
    assert trainer.history[-1]["agent_loop/trajectories/failed"] == 0
