"""The languages of a sandbox: the program's file, how it is compiled, how it is started."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Language:
    """`{memory}` in a command: the limit in MB."""

    file: str
    needs: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    start: tuple[str, ...] = ()  # none: Python, which runs in a process that has it loaded already

    def missing(self) -> str | None:
        """The tool that this machine lacks."""
        return next((tool for tool in self.needs if shutil.which(tool) is None), None)


_PYTHON = Language("main.py")
_SHELL = Language("main.sh", ("bash",), start=("bash", "main.sh"))
_CPP = Language("main.cpp", ("g++",), ("g++", "-O2", "-std=c++17", "-pipe", "-o", "main", "main.cpp"), ("./main",))
_NODE = Language("main.js", ("node",), start=("node", "--max-old-space-size={memory}", "main.js"))
LANGUAGES = {
    "python": _PYTHON,
    "shell": _SHELL,
    "bash": _SHELL,
    "sh": _SHELL,
    "cpp": _CPP,
    "c++": _CPP,
    "javascript": _NODE,
    "js": _NODE,
    "nodejs": _NODE,
}


def find(name: str) -> tuple[Language | None, str]:
    """The language, or None and why not, in words."""
    language = LANGUAGES.get(name.lower())
    if language is None:
        return None, f"language {name!r} is not one of {', '.join(LANGUAGES)}"
    tool = language.missing()
    if tool is not None:
        return None, f"language {name!r} needs {tool}, which is not on this machine's PATH"
    return language, ""


def search_path() -> str:
    """PATH of programs in a sandbox: where their tools are, then the system's."""
    found = {"python": sys.executable}
    for tool in ("node", "g++"):
        found[tool] = shutil.which(tool) or ""
    folders = [path.rpartition("/")[0] for path in found.values() if path]
    return ":".join(dict.fromkeys([*folders, "/usr/local/bin", "/usr/bin", "/bin"]))
