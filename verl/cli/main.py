"""`verl SUBCOMMAND …`: the table of subcommands, and the dispatcher that imports a program when it is called.

`verl train key=value …` runs the same program as `python -m verl.trainer.main_ppo key=value …`. Help imports neither
torch nor ray.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from verl.version import __version__

_HELP = ("--help", "-h", "help")


@dataclass(frozen=True)
class Subcommand:
    """A subcommand of `verl`.

    `import_path` is `module:attribute` of its function. With `config` (the name of its YAML file of defaults)
    the function takes no arguments and reads `sys.argv`; otherwise it takes the arguments and returns the exit code.
    """

    name: str
    description: str
    import_path: str
    config: str | None = None
    choices: tuple[str, ...] = ()
    """Possible first arguments, for shell completion."""

    def run(self, arguments: list[str]) -> int:
        """Import and run the program; return its exit code."""
        sys.argv = [f"verl {self.name}", *arguments]
        if self.config is not None and _wants_help(arguments):
            return _show_config_help(self.config, arguments, sys.argv[0])
        function: Callable[..., Any] = resolve_name(self.import_path)
        return (function() if self.config is not None else function(arguments)) or 0


LIST_KINDS = ("estimators", "losses", "rewards", "loops", "engines", "trackers")
SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("train", "sft", "rm")
"""Programs whose runs `verl check` and `verl plan` examine."""

SUBCOMMANDS = {
    subcommand.name: subcommand
    for subcommand in (
        Subcommand("train", "train by reinforcement learning", "verl.trainer.main_ppo:main", "ppo_trainer"),
        Subcommand("sft", "fine-tune on given responses", "verl.trainer.main_sft:main", "sft_trainer"),
        Subcommand("rm", "train a reward model", "verl.trainer.main_rm:main", "rm_trainer"),
        Subcommand(
            "generate", "generate responses to a file of prompts", "verl.trainer.main_generation:main", "generation"
        ),
        Subcommand("eval", "score the responses of a file", "verl.trainer.main_eval:main", "evaluation"),
        Subcommand("view", "show recorded runs in the browser", "verl.viewer.__main__:main"),
        Subcommand("serve", "serve a model with the OpenAI API", "verl.inference.server:main"),
        Subcommand(
            "merge", "write a checkpoint as a Hugging Face model", "verl.cli.main:merge", choices=("merge", "test")
        ),
        Subcommand("check", "check data, reward, tools and template of a run", "verl.cli.check:main", choices=PROGRAMS),
        Subcommand("plan", "memory and time of a run, without running it", "verl.cli.plan:main", choices=PROGRAMS),
        Subcommand("summary", "what improved in a run, and where its time went", "verl.cli.summary:main"),
        Subcommand("doctor", "check this machine and the installed packages", "verl.cli.doctor:main"),
        Subcommand("init", "create a starter project", "verl.cli.init:main"),
        Subcommand("list", "list estimators, losses, rewards, …", "verl.cli.listing:main", choices=LIST_KINDS),
        Subcommand("completion", "print a completion script for a shell", "verl.cli.completion:main", choices=SHELLS),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand named by the first argument; return its exit code, 2 for an unknown subcommand."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] and len(words) > 1:  # `verl help train` is `verl train --help`
        words = [words[1], "--help", *words[2:]]
    if not words or words[0] in _HELP:
        sys.stdout.write(overview())
        return 0
    if words[0] in ("--version", "-V"):
        sys.stdout.write(f"verl {__version__}\n")
        return 0
    subcommand = SUBCOMMANDS.get(words[0])
    if subcommand is None:
        sys.stderr.write(unknown_name("subcommand", words[0], tuple(SUBCOMMANDS)))
        return 2
    return subcommand.run(words[1:])


def merge(arguments: list[str]) -> int:
    """Run the model merger; `merge` is its default command."""
    from verl.model_merger.__main__ import main as run_merger

    if arguments[:1] not in (["merge"], ["test"]) and not _wants_help(arguments):
        arguments = ["merge", *arguments]
    return run_merger(arguments)


def overview() -> str:
    """Return the text of `verl --help`."""
    lines = ["usage: verl SUBCOMMAND …", "", "Reinforcement learning for language models.", ""]
    lines += [f"  {subcommand.name:<12} {subcommand.description}" for subcommand in SUBCOMMANDS.values()]
    lines += [
        "",
        "verl SUBCOMMAND --help: usage and most important keys. verl train --help data: all keys of a block.",
        "First steps: verl doctor; verl init my_project. Documentation: docs/index.md of the repository.",
    ]
    return "\n".join(lines) + "\n"


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown name, with the closest known one."""
    begins = [other for other in known if other.startswith(name)]
    near = begins or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"verl: there is no {kind} {name!r}.{hint} Known: {', '.join(known)}.\n"


def _wants_help(arguments: Sequence[str]) -> bool:
    return any(argument.partition("=")[0] in ("--help", "-h") for argument in arguments)


def _show_config_help(config: str, arguments: Sequence[str], usage: str) -> int:
    from verl.config.help import find_program, requested_help, show_help

    return show_help(find_program(config), requested_help(arguments) or [], usage)
