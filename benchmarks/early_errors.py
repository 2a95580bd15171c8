"""Seconds, exit code and last lines of `main_ppo` and the other programs for common mistakes, each in its own folder.

`python benchmarks/early_errors.py [NAME …]`: one row per mistake. The program must exit with code 2 within 5 seconds on
an idle machine (plus imports of user files), without starting Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PPO, SFT, RM, GENERATION = (f"verl.trainer.{name}" for name in ("main_ppo", "main_sft", "main_rm", "main_generation"))
TURNS = "actor_rollout_ref.rollout.multi_turn"
_TIMEOUT = 400


@dataclass(frozen=True)
class Mistake:
    """A mistake in the command of a program: `prepare` writes files to a folder and returns the wrong overrides."""

    name: str
    prepare: Callable[[Path], list[str]]
    program: str = PPO
    environment: dict[str, str] = field(default_factory=dict)


def rows(count: int = 8, **changes: Any) -> list[dict[str, Any]]:
    """Valid rows; `changes` replace columns, None removes one."""
    complete = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            **changes,
        }
        for number in range(count)
    ]
    return [{name: value for name, value in row.items() if value is not None} for row in complete]


def parquet(folder: Path, data: list[dict[str, Any]], name: str = "bad.parquet") -> str:
    """Write a file with these rows; return the override `data.train_files=…` for it."""
    path = folder / name
    pq.write_table(pa.Table.from_pylist(data) if data else pa.table({"prompt": pa.array([], pa.string())}), path)
    return f"data.train_files={path}"


def file(folder: Path, name: str, text: str) -> Path:
    """Write a file with this text; return its path."""
    path = folder / name
    path.write_text(text)
    return path


def _invalid_json(folder: Path) -> list[str]:
    lines = [json.dumps(row) for row in rows(3)]
    return [f"data.train_files={file(folder, 'bad.jsonl', lines[0] + chr(10) + lines[1][:-4] + chr(10) + lines[2])}"]


def _imported_syntax_error(folder: Path) -> list[str]:
    file(folder, "scoring_helper.py", "def score(text):\n    return 1.0 if text else\n")
    source = (
        "from scoring_helper import score\n\ndef compute_score(solution_str, ground_truth):\n    return score('')\n"
    )
    return [f"custom_reward_function.path={file(folder, 'reward.py', source)}"]


def _tool_yaml(text: str) -> Callable[[Path], list[str]]:
    return lambda folder: [f"{TURNS}.enable=True", f"{TURNS}.tool_config_path={file(folder, 'tools.yaml', text)}"]


def _function_tool(folder: Path) -> list[str]:
    path = file(folder, "my_tools.py", "def add(a: int, b: int) -> int:\n    return a + b\n")
    return [f"{TURNS}.enable=True", f"{TURNS}.function_tool_path={path}"]


def _reward_file(text: str) -> Callable[[Path], list[str]]:
    return lambda folder: [f"custom_reward_function.path={file(folder, 'reward.py', text)}"]


# A server that never responds: the kernel accepts connections up to the backlog.
SILENT = socket.create_server(("127.0.0.1", 0))
UNREACHABLE = {"HF_ENDPOINT": f"http://127.0.0.1:{SILENT.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
MISTAKES = [
    Mistake("missing column", lambda f: [parquet(f, [{"question": "1 + 1", "answer": "2"}] * 8)]),
    Mistake("empty file", lambda f: [parquet(f, [])]),
    Mistake("invalid JSON line", _invalid_json),
    Mistake("batch larger than the dataset", lambda f: ["data.train_batch_size=64"]),
    Mistake(
        "syntax error in reward file", _reward_file("def compute_score(solution_str, ground_truth)\n    return 1\n")
    ),
    Mistake("syntax error in a file it imports", _imported_syntax_error),
    Mistake("no such reward function", _reward_file("def score(solution_str, ground_truth):\n    return 1.0\n")),
    Mistake("unknown data_source", lambda f: [parquet(f, rows(data_source="openai/gsm8"))]),
    Mistake("tool YAML without tools:", _tool_yaml("- class_name: a.B\n")),
    Mistake("YAML error in tool file", _tool_yaml("tools:\n  - class_name: [a.B\n    config: {}\n")),
    Mistake("misspelt tool class", _tool_yaml("tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTol\n")),
    Mistake("undecorated tool function", _function_tool),
    Mistake("device=cuda without GPU", lambda f: ["trainer.device=cuda"], environment={"CUDA_VISIBLE_DEVICES": ""}),
    Mistake("unreachable hub", lambda f: ["actor_rollout_ref.model.path=some-org/some-model"], PPO, UNREACHABLE),
    Mistake("experiment_name escapes", lambda f: ["trainer.experiment_name=../../x"]),
    Mistake("SFT: missing column", lambda f: [parquet(f, [{"question": "1 + 1", "answer": "2"}] * 8)], SFT),
    Mistake("RM: missing column", lambda f: [parquet(f, [{"prompt": "1 + 1", "better": "2"}] * 8)], RM),
    Mistake("generation: empty file", lambda f: [parquet(f, []).replace("train_files", "path")], GENERATION),
]


def valid_arguments(program: str, folder: Path, model: Path) -> list[str]:
    """The arguments of a correct run of the program."""
    data = parquet(folder, rows(), "good.parquet").partition("=")[2]
    if program == PPO:
        return [
            f"data.train_files={data}",
            f"actor_rollout_ref.model.path={model}",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=4",
            "data.max_prompt_length=64",
            "data.max_response_length=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.mode=async",
            "trainer.total_training_steps=1",
            "trainer.logger=console",
            f"trainer.default_local_dir={folder}/checkpoints",
        ]
    if program == GENERATION:
        return [
            f"data.path={data}",
            f"data.output_path={folder}/answers.parquet",
            f"model.path={model}",
            "data.max_prompt_length=64",
            "rollout.max_new_tokens=16",
        ]
    return [
        f"data.train_files={data}",
        f"model.path={model}",
        "data.train_batch_size=4",
        "data.max_length=128",
        "trainer.logger=console",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]


def run(mistake: Mistake, model: Path) -> tuple[float, float, int | None, str]:
    """Wall-clock seconds, CPU seconds, exit code (None: timeout) and output of the command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [*valid_arguments(mistake.program, folder, model), *mistake.prepare(folder)]
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "RAY_ADDRESS": "local", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", mistake.program, *arguments]
        start, cpu_before = time.monotonic(), _cpu_seconds()
        try:
            process = subprocess.run(
                command,
                cwd=folder,
                env=environment | mistake.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            return time.monotonic() - start, _cpu_seconds() - cpu_before, None, str(error.stdout or "")
        output = process.stdout.replace(f"{folder}/", "")
        return time.monotonic() - start, _cpu_seconds() - cpu_before, process.returncode, output


def _cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.tiny import save_tiny_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of mistakes; default: all")
    parser.add_argument("--lines", type=int, default=2, help="last lines of output to show")
    options = parser.parse_args()
    known = [mistake.name for mistake in MISTAKES]
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"unknown mistake {', '.join(unknown)}. Known: {', '.join(known)}.")
    console = Console(width=200, highlight=False)
    table = Table("mistake", "seconds", "CPU seconds", "exit code", "Ray started", "last lines", show_lines=True)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model")
        for mistake in MISTAKES:
            if options.names and mistake.name not in options.names:
                continue
            seconds, cpu, code, output = run(mistake, model)
            last = "\n".join(output.rstrip().splitlines()[-options.lines :])
            started = "yes" if "Initializing Ray" in output else "no"
            table.add_row(mistake.name, f"{seconds:.1f}", f"{cpu:.1f}", str(code), started, escape(last))
            console.print(f"{mistake.name}: {seconds:.1f} s ({cpu:.1f} s of CPU), exit code {code}")
    console.print(table)


if __name__ == "__main__":
    main()
