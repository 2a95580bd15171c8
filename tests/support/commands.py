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
    # Not recorded: the modules of a recipe and its retriever.
    ignored = '"-c "*|"-m recipe."*|"-m verl.search."*'
    record_command = f"""case "$1 $2" in {ignored}) ;; *) printf '%s\\0' "$@" > '{arguments_file}' ;; esac"""
    python3.write_text(f"#!/bin/sh\n{record_command}\nexit {exit_code}\n")
    python3.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/home/user", "DATA_ROOT": "/data"}
    result = subprocess.run(["bash", script, *extra], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == exit_code, result.stderr
    return arguments_file.read_text().removesuffix("\0").split("\0")


def compose_config(arguments: list[str]) -> Any:
    """Return the configuration of `python3 -m module key=value …` without checking that its files exist."""
    import hydra

    from verl.config import EvalConfig, GenerationConfig, RMConfig, SFTConfig, load_config
    from verl.config.command_line import hydra_arguments

    flag, module, *overrides = arguments
    assert flag == "-m"
    name, root = {
        "verl.trainer.main_ppo": ("ppo_trainer", None),
        "verl.trainer.main_sft": ("sft_trainer", SFTConfig),
        "verl.trainer.main_rm": ("rm_trainer", RMConfig),
        "verl.trainer.main_generation": ("generation", GenerationConfig),
        "verl.trainer.main_eval": ("evaluation", EvalConfig),
    }[module]
    hydra_overrides = hydra_arguments(overrides) if root is None else hydra_arguments(overrides, root=name)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        options = {} if root is None else {"root": root}
        return load_config(hydra.compose(name, overrides=hydra_overrides), check_files=False, **options)
