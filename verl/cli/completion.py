"""`verl completion bash|zsh|fish`: a script that completes subcommands and their fixed first arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from verl.cli.main import SHELLS, SUBCOMMANDS, unknown_name

_USAGE = """usage: verl completion bash|zsh|fish

Print a completion script for a shell. To enable it:
  bash   echo 'eval "$(verl completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(verl completion zsh)"' >> ~/.zshrc
  fish   verl completion fish > ~/.config/fish/completions/verl.fish
"""


def main(arguments: Sequence[str]) -> int:
    """Print the script of the named shell; return the exit code."""
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(_USAGE)
        return 0 if arguments else 2
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}.get(arguments[0])
    if script is None:
        sys.stderr.write(unknown_name("shell", arguments[0], SHELLS))
        return 2
    sys.stdout.write(script())
    return 0


def _cases(line: Callable[[str, str], str]) -> str:
    """Return one line for each subcommand with fixed first arguments."""
    return "\n".join(line(name, " ".join(entry.choices)) for name, entry in SUBCOMMANDS.items() if entry.choices)


def _bash() -> str:
    cases = _cases(lambda name, words: f'      {name}) words="{words}" ;;')
    return f"""_verl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{" ".join(SUBCOMMANDS)}"
  elif [ "$COMP_CWORD" -eq 2 ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _verl verl
"""


def _zsh() -> str:
    described = "\n".join(f"    '{name}:{entry.description}'" for name, entry in SUBCOMMANDS.items())
    cases = _cases(lambda name, words: f"      {name}) compadd {words} ;;")
    return f"""#compdef verl
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
_verl() {{
  local -a subcommands
  subcommands=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe 'subcommand' subcommands
  elif (( CURRENT == 3 )); then
    case "$words[2]" in
{cases}
      *) _files ;;
    esac
  else
    _files
  fi
}}
compdef _verl verl
"""


def _fish() -> str:
    lines = [
        f"complete -c verl -n __fish_use_subcommand -f -a {name} -d '{entry.description}'"
        for name, entry in SUBCOMMANDS.items()
    ]
    cases = _cases(lambda name, words: f"complete -c verl -n '__verl_first_argument_of {name}' -f -a '{words}'")
    # `__fish_seen_subcommand_from` would offer the words again after the first argument.
    condition = """function __verl_first_argument_of
  set -l words (commandline -opc)
  test (count $words) -eq 2; and test $words[2] = $argv[1]
end"""
    return "\n".join([condition, *lines, cases]) + "\n"
