"""Run shell scripts with a `python3` that only records its arguments, and compose the configuration of a command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_script(script: str, tmp_path: Path, *extra: str, exit_code: int = 0) -> list[str]:
    """Run a script with a `python3` that only records its arguments; return those of the last training command."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    arguments_file = tmp_path / "arguments"
    arguments_file.unlink(missing_ok=True)
    python3 = programs / "python3"
    # Not recorded: `python3 -c`, the modules of a recipe and its retriever.
    ignored = '"-c "*|"-m recipe."*|"-m verl.search."*'
    record_command = f"""case "$1 $2" in {ignored}) ;; *) printf '%s\\0' "$@" > '{arguments_file}' ;; esac"""
    python3.write_text(f"#!/bin/sh\n{record_command}\nexit {exit_code}\n")
    python3.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/home/user", "DATA_ROOT": "/data"}
    result = subprocess.run(["bash", script, *extra], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == exit_code, result.stderr
    return arguments_file.read_text().removesuffix("\0").split("\0")


def compose_config(arguments: list[str]) -> Any:
    """Return the configuration of `python3 -m module key=value …` without checking that its files exist.

    Without Hydra, which takes ten times as long; tests/unit/config/test_command_line.py proves that results are equal.
    """
    from verl.config import EvalConfig, GenerationConfig, PPOConfig, RMConfig, SFTConfig, load_config

    flag, module, *overrides = arguments
    assert flag == "-m"
    roots: dict[str, Any] = {
        "verl.trainer.main_ppo": PPOConfig,
        "verl.trainer.main_sft": SFTConfig,
        "verl.trainer.main_rm": RMConfig,
        "verl.trainer.main_generation": GenerationConfig,
        "verl.trainer.main_eval": EvalConfig,
    }
    return load_config(None, overrides, check_files=False, root=roots[module])
