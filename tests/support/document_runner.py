"""Executes the code blocks of one document in an empty folder with links to the files of the repository root."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.documents import ROOT, SHELL, Block, matches

# Read-only parts of the repository; everything else is written into the folder.
LINKS = ("examples", "recipe", "benchmarks", "docs", "tests", "pyproject.toml", "constraints.txt")
TRAINING = ("train", "sft", "rm", "generate", "eval", "check")
# The overrides that the word `tiny` in a directive stands for. `PageRun` creates the files.
TINY = {
    "actor_rollout_ref.model.path": "tiny/model",
    "data.train_files": "tiny/train.parquet",
    "data.val_files": "tiny/train.parquet",
    "data.train_batch_size": "4",
    "data.max_prompt_length": "512",
    "data.max_response_length": "16",
    "data.dataloader_num_workers": "0",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": "1",
    "trainer.total_training_steps": "1",
    "trainer.save_freq": "-1",
    "trainer.test_freq": "-1",
}


class PageRun:
    """A folder for one document. Blocks run in order and see the files of earlier ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / ".bin"
        programs.mkdir(parents=True)
        commands = {"python": "", "python3": "", "verl": "-m verl", "pytest": "-m pytest"}
        for name, module in commands.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            program.chmod(0o755)
        for name in LINKS:
            (folder / name).symlink_to(ROOT / name)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "HF_HUB_OFFLINE": "1",
            # The variables that pages use for a model and its prompts.
            "MODEL": "tiny/model",
            "DATA": "tiny/train.parquet",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def run(self, block: Block) -> str | None:
        """Execute a block; return its problem, or None."""
        if any("tiny" in word for word in block.overrides) or "$MODEL" in block.text:
            self._create_tiny()
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.language in SHELL:
            command = ["bash", "-euo", "pipefail", "-c", with_overrides(block.text, block.overrides)]
        elif block.file is not None:
            command = [sys.executable, "-c", f"import runpy; runpy.run_path({block.file!r})"]
        else:
            command = [sys.executable, "-c", block.text]
        process = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            return f"{block.location}: exit code {process.returncode}\n{process.stdout[-4000:]}"
        if block.output is not None and not matches(block.output, process.stdout):
            return f"{block.location}: expected output\n{block.output}\nbut the output was\n{process.stdout[-4000:]}"
        return None

    def _create_tiny(self) -> None:
        """`tiny/model` and `tiny/train.parquet`: a random model, and rows in the format of GSM8K."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from tests.support.tiny import save_tiny_model

        if (self.folder / "tiny").exists():
            return
        save_tiny_model(self.folder / "tiny/model", max_position_embeddings=2048)
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"What is {i} plus {i + 1}? Answer after ####."}],
                "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
                "extra_info": {"index": i, "answer": f"{i} + {i + 1} = {2 * i + 1} #### {2 * i + 1}"},
            }
            for i in range(16)
        ]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "tiny/train.parquet")


def with_overrides(script: str, overrides: list[str]) -> str:
    """Add `key=value` words to the training commands of a script; an existing key is replaced."""
    if not overrides:
        return script
    values: dict[str, str] = {}
    for word in overrides:
        key, _, value = word.partition("=")
        values.update(TINY if word == "tiny" else {key: value})
    lines = script.replace("\\\n", " ").splitlines()
    return "\n".join(_override(line, values) if _is_training_command(line) else line for line in lines)


def _is_training_command(line: str) -> bool:
    words = shlex.split(line, comments=True)
    verl = words[:1] == ["verl"] and words[1:2] != [] and words[1] in TRAINING
    module = words[1:2] == ["-m"] and len(words) > 2 and words[2].startswith("verl.trainer.main_")
    script = words[:1] == ["bash"] and len(words) > 1
    return verl or module or script


def _override(line: str, values: dict[str, str]) -> str:
    line = line.partition(" #")[0]
    for key in values:
        line = re.sub(rf"(?<=\s)(['\"]?){re.escape(key)}=.*?\1(?=\s|$)", "", line)
    return line + "".join(f" {shlex.quote(f'{key}={value}')}" for key, value in values.items())
