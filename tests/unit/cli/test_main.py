"""The command `verl` as a user runs it: dispatch, help without heavy imports, suggestions, completion."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pkgutil import resolve_name
from types import ModuleType

import pytest

from verl.cli import main as cli
from verl.cli.main import SHELLS, SUBCOMMANDS, main
from verl.version import __version__

HEAVY = ("torch", "ray", "transformers", "numpy", "hydra")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "verl", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _keep_argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])


@pytest.mark.parametrize(
    "arguments", [["train", "--help"], ["train", "--help", "actor.optim"], ["serve", "--help"], ["plan", "--help"]]
)
def test_help_imports_nothing_heavy(arguments):
    program = f"""
import atexit, sys
from verl.cli.main import main
atexit.register(lambda: print([name for name in {HEAVY!r} if name in sys.modules]))
sys.exit(main({arguments!r}))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_prints_usage_keys_and_version():
    overview = run()
    assert overview.returncode == 0
    for name in SUBCOMMANDS:
        assert f"\n  {name} " in overview.stdout
    assert run("--version").stdout == f"verl {__version__}\n"
    block = run("help", "sft", "optim")
    assert block.returncode == 0
    assert "  lr = 1e-05\n      Learning rate (AdamW)." in block.stdout


def test_module_spellings_print_the_same_help():
    module = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_eval", "--help"], capture_output=True, text=True, check=True
    )
    command = run("eval", "--help")
    name = "python -m verl.trainer.main_eval"
    assert module.stdout.startswith(f"usage: {name} ")
    assert module.stdout.replace(name, "verl eval").split() == command.stdout.split()


def test_a_program_runs_with_its_arguments(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["eval", "data.pth=a.parquet"])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert "data.pth" in printed
    assert "data.path" in printed


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["trian"], "'train'"),
        (["list", "los"], "'losses'"),
        (["completion", "bsh"], "'bash'"),
        (["train", "--help", "actr.optim"], "actor_rollout_ref.actor.optim"),
    ],
)
def test_unknown_names_suggest_the_closest(arguments, suggestion, capsys):
    assert main(arguments) == 2
    assert f"Did you mean {suggestion}" in capsys.readouterr().err


@pytest.mark.parametrize("subcommand", ["check", "plan"])
def test_an_unknown_program_suggests_the_closest(subcommand, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([subcommand, "trian", "data.train_files=a"])
    assert exit_.value.code == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_every_subcommand_exists():
    for subcommand in SUBCOMMANDS.values():
        assert callable(resolve_name(subcommand.import_path))


def test_merge_is_the_default_command_of_the_merger(monkeypatch):
    calls = []
    monkeypatch.setattr("verl.model_merger.__main__.main", lambda arguments: calls.append(arguments) or 0)
    cli.merge(["--backend", "fsdp"])
    cli.merge(["test", "--backend", "fsdp"])
    assert calls == [["merge", "--backend", "fsdp"], ["test", "--backend", "fsdp"]]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts_have_every_subcommand(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in SUBCOMMANDS)
    assert "estimators" in script


def test_bash_completes_subcommands_and_kinds(capsys):
    main(["completion", "bash"])
    script = capsys.readouterr().out
    probe = 'COMP_WORDS=(verl {}); COMP_CWORD={}; _verl; echo "${{COMPREPLY[@]}}"'
    for words, place, expected in (("do", 1, "doctor"), ("list t", 2, "trackers"), ("merge t", 2, "test")):
        done = subprocess.run(
            ["bash", "-c", script + probe.format(words, place)], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [expected]


def test_fish_completes_kinds_only_as_the_first_argument(capsys):
    main(["completion", "fish"])
    script = capsys.readouterr().out
    assert "__fish_seen_subcommand_from" not in script, "true for every later argument"
    assert "test (count $words) -eq 2; and test $words[2] = $argv[1]" in script
    assert "complete -c verl -n '__verl_first_argument_of completion' -f -a 'bash zsh fish'" in script


@pytest.mark.usefixtures("logging_as_before")
def test_the_server_logs_a_line_before_its_imports(monkeypatch, capsys):
    """They take seconds, on a busy machine tens of seconds."""
    phases, lines = [], []

    def startup_phase(name):
        phases.append(name)
        lines.extend(capsys.readouterr().err.splitlines())
        return nullcontext()

    program, app = ModuleType("verl.inference.serving.program"), ModuleType("verl.inference.serving.app")
    program.serve, app.in_options = lambda options: phases.append(options.model), str
    for module in (program, app):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("verl.inference.server.startup_phase", startup_phase)
    assert main(["serve", "--model", "a/model"]) == 0
    assert phases == ["imports", "a/model"]
    assert ["a/model" in line for line in lines] == [True]


def test_the_module_of_the_server_imports_neither_torch_nor_a_web_server():
    """`python -m verl.inference.server` imports it before it can show that it starts."""
    code = "import sys, verl.inference.server; print({'torch', 'starlette'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
