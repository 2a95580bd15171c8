"""Checks documented commands without running them: configurations are composed, options are looked up in `--help`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path
from unittest import mock

from tests.support.commands import ROOT, compose_config, run_script
from verl.cli.main import SUBCOMMANDS
from verl.config import ConfigError
from verl.config.help import find_program, help_text, requested_help

# Required overrides of the training modules, added to commands that the text quotes incompletely.
CONFIGURED = {
    "verl.trainer.main_ppo": ["data.train_files=a.parquet", "actor_rollout_ref.model.path=org/model"],
    "verl.trainer.main_sft": ["data.train_files=a.parquet", "model.path=org/model"],
    "verl.trainer.main_rm": ["data.train_files=a.parquet", "model.path=org/model"],
    "verl.trainer.main_generation": ["data.path=a.parquet", "data.output_path=b.parquet", "model.path=org/model"],
    "verl.trainer.main_eval": ["data.path=a.parquet"],
}
# Modules of this repository without options and --help.
WITHOUT_OPTIONS = {"verl.types.schema", "tests.support.documents"}
# Commands that are not checked, with the reason.
UNCHECKED = {
    "export": "sets a variable of the reader's shell",
    "cd": "changes the folder of the reader's shell",
    "echo": "changes a file of the reader",
    "bash my_project/run.sh": "the project of `verl init`; tests/e2e/test_starter.py runs it",
    "bash run.sh": "belongs to the project of `verl init`; tests/e2e/test_starter.py runs it",
    "python test_reward.py": "belongs to the project of `verl init`; tests/e2e/test_starter.py runs it",
    "bash benchmarks/fresh_clone.sh": "clones and installs the repository",
    "pip wheel": "tests/e2e/test_wheel.py builds one",
    "build": "a package that is not installed here; tests/e2e/test_wheel.py builds a wheel",
    "curl": "needs a running server; tests/unit/agent/gateway/test_secrets.py sends such requests",
    "ray start": "starts a cluster; tests/unit/trainer and tests/e2e start Ray themselves",
    "ray stop": "stops all Ray processes of the machine",
    "ray status": "needs a running cluster",
    "sbatch": "needs Slurm; tests/unit/examples/test_cluster.py runs the script",
    "kubectl apply": "needs Kubernetes; tests/unit/examples/test_cluster.py reads the file",
    "bash examples/cluster/ssh.sh": "needs machines; tests/unit/examples/test_cluster.py replaces ssh",
    "pip download": "needs a package index",
    "hf download": "needs the hub",
    "wandb login": "needs a key",
    "python my_data.py": "a file of the page; the slow tier runs it",
    "tensorboard": "starts a server",
    "vllm": "starts a server; tests/engines/test_servers.py does so",
    "sglang.launch_server": "starts a server; tests/engines/test_servers.py does so",
}
PROGRAMS = (
    "python",
    "python3",
    "verl",
    "make",
    "bash",
    "pip",
    *{name.split()[0] for name in UNCHECKED} - {"tensorboard"},
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


# ---------------------------------------------------------------- finding commands


def commands_of(script: str) -> list[str]:
    """The command lines of a shell block."""
    lines = [line.strip().removeprefix("$ ") for line in script.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def sentence_commands(text: str) -> list[str]:
    """Command lines that are quoted in the sentences of a document; they may be incomplete."""
    quoted = INLINE.findall(FENCE.sub("", text))
    return [line for line in quoted if line.split()[0] in PROGRAMS and len(line.split()) > 1]


def words_of(line: str) -> list[list[str]]:
    """Split a line into its simple commands, each a list of words, like a shell; optional words are included."""
    line = re.sub(r"(?<=\s)\[(--[^\]]*)\]", r"\1", line)
    line = re.sub(r"(?<=\s)\[[^\]]*…\]", "", line)
    words = shlex.split(os.path.expandvars(line.partition(" > ")[0]), comments=True)
    commands: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "||", "|", ";"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in map(without_variables, commands) if command]


def without_variables(words: list[str]) -> list[str]:
    """Remove `NAME=value` words in front of the program."""
    start = next((i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)), len(words))
    return words[start:]


# ---------------------------------------------------------------- checking them


def problem_of(words: list[str], whole: bool, tmp_path: Path, foreign: bool = False) -> str | None:
    """The problem of a command, or None.

    `whole`: the command is complete; otherwise required overrides are added. `foreign`: programs of other projects are
    not checked.
    """
    program, *operands = words
    arguments = [word for word in operands if "…" not in word and word not in ("key=value", "FILE")]
    if " ".join(words[:2]) in UNCHECKED or program in UNCHECKED:
        return None
    if words[:2] == ["verl", "plan"] and whole:
        return plan_problem(arguments[1:])
    if program == "make":
        return make_problem(operands)
    if program == "pip":
        return pip_problem(operands)
    if program == "bash":
        return script_problem(arguments, tmp_path)
    if program == "verl":
        return verl_problem(operands, arguments, whole and len(arguments) == len(operands))
    if program in ("python", "python3") and operands and operands[0] == "-m":
        return module_problem(operands[1], arguments[2:], whole and len(arguments) == len(operands))
    if program in ("python", "python3") and operands and operands[0].endswith(".py"):
        return options_problem(operands[0], arguments[1:])
    return None if foreign else "no check for this kind of command: add one, or an entry of UNCHECKED with the reason"


def verl_problem(words: list[str], arguments: list[str], whole: bool) -> str | None:
    """`verl SUBCOMMAND …`: the same as the module of the subcommand; `words` include placeholders."""
    subcommand = SUBCOMMANDS.get(words[0])
    if subcommand is None:
        return f"there is no subcommand {words[0]}"
    if subcommand.config is not None and (blocks := requested_help(words[1:])) is not None:
        return None if help_text(find_program(subcommand.config), blocks, "verl") else "no help"
    if subcommand.config is not None:
        return module_problem(subcommand.import_path.split(":")[0], arguments[1:], whole)
    if subcommand.name == "check" and any("=" in word for word in arguments):
        kind = arguments[1] if arguments[1] in ("sft", "rm") else "ppo"
        overrides = [word for word in arguments[1:] if "=" in word]
        return configuration_problem(("-m", f"verl.trainer.main_{kind}", *overrides))
    options = [word for word in arguments if word.startswith("--") and word != "--help"]
    text = help_of_subcommand(subcommand.name) if options else ""
    return next((f"verl {words[0]} --help names no {option}" for option in options if option not in text), None)


@cache
def help_of_subcommand(name: str) -> str:
    output = io.StringIO()
    with mock.patch.object(sys, "argv"), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        SUBCOMMANDS[name].run(["--help"])
    return output.getvalue()


def make_problem(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        pattern = rf"^{word.split('=')[0]} \?=" if "=" in word else rf"^{re.escape(word)}:"
        if not re.search(pattern, text, re.MULTILINE):
            return f"the Makefile has no {word}"
    return None


def pip_problem(words: list[str]) -> str | None:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^([\w-]+) = ", section, re.MULTILINE)
    if words[:1] != ["install"]:
        return "no check for this pip command"
    names = [name for word in words for part in re.findall(r"^\.\[(.*)\]$", word) for name in part.split(",")]
    return next((f"there is no extra {name}" for name in names if name not in extras), None)


def script_problem(words: list[str], tmp_path: Path) -> str | None:
    if not (ROOT / words[0]).is_file():
        return f"there is no {words[0]}"
    return configuration_problem(tuple(run_script(words[0], tmp_path, *words[1:])))


def module_problem(module: str, arguments: list[str], whole: bool) -> str | None:
    if module in UNCHECKED:
        return None
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    if module in WITHOUT_OPTIONS:
        return f"{module} takes no arguments" if arguments else None
    if module not in CONFIGURED:
        return options_problem(module, arguments)
    overrides = [word for word in arguments if not word.startswith("--")]
    if "--cfg" in arguments:  # prints the configuration
        overrides.remove("job")
    return configuration_problem(("-m", module, *([] if whole else CONFIGURED[module]), *overrides))


@cache
def configuration_problem(arguments: tuple[str, ...]) -> str | None:
    try:
        compose_config(list(arguments))
    except ConfigError as error:
        return str(error)
    return None


def plan_problem(arguments: list[str]) -> str | None:
    from verl.cli.plan import parse_arguments, planned_run

    try:
        planned_run(parse_arguments(arguments))
    except ValueError as error:
        return str(error)
    return None


def options_problem(program: str, arguments: list[str]) -> str | None:
    if program.endswith(".py") and not (ROOT / program).is_file():
        return f"there is no {program}"
    text = help_of(program)
    options = [word.split("=")[0] for word in arguments if word.startswith("--") and word != "--help"]
    return next((f"{program} --help names no {option}" for option in options if option not in text), None)


@cache
def help_of(program: str) -> str:
    """Return the output of `program --help`, run in this process because it has imported the heavy modules already."""
    output = io.StringIO()
    folder = [str((ROOT / program).parent)] if program.endswith(".py") else []
    with (
        mock.patch.object(sys, "argv", [program, "--help"]),
        mock.patch.object(sys, "path", [*folder, *sys.path]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert output.getvalue().startswith("usage:"), f"{program} has no --help"
    return output.getvalue()
