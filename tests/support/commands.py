"""Commands as users type them: scripts run with a `python3` that only notes its arguments, configurations composed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_script(script: str, tmp_path: Path, *extra: str, exit_code: int = 0) -> list[str]:
    """Run it for real, with a `python3` that only notes its arguments; those of the last training it starts."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    noted = tmp_path / "arguments"
    noted.unlink(missing_ok=True)
    python3 = programs / "python3"
    # What a recipe does before and after is not noted: its own modules, a retriever that it starts and asks.
    aside = '"-c "*|"-m recipe."*|"-m verl.search."*'
    note = f"""case "$1 $2" in {aside}) ;; *) printf '%s\\0' "$@" > '{noted}' ;; esac"""
    python3.write_text(f"#!/bin/sh\n{note}\nexit {exit_code}\n")
    python3.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/home/user", "DATA_ROOT": "/data"}
    done = subprocess.run(["bash", script, *extra], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    return noted.read_text().removesuffix("\0").split("\0")


def composed(arguments: list[str]) -> Any:
    """The configuration that `python3 -m module key=value …` would run with, whatever files this machine has."""
    import hydra

    from verl.config import EvalConfig, GenerationConfig, RMConfig, SFTConfig, load_config
    from verl.config.command_line import hydra_arguments

    flag, module, *typed = arguments
    assert flag == "-m"
    name, root = {
        "verl.trainer.main_ppo": ("ppo_trainer", None),
        "verl.trainer.main_sft": ("sft_trainer", SFTConfig),
        "verl.trainer.main_rm": ("rm_trainer", RMConfig),
        "verl.trainer.main_generation": ("generation", GenerationConfig),
        "verl.trainer.main_eval": ("evaluation", EvalConfig),
    }[module]
    given = hydra_arguments(typed) if root is None else hydra_arguments(typed, root=name)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        options = {} if root is None else {"root": root}
        return load_config(hydra.compose(name, overrides=given), check_files=False, **options)
