"""Commands that install extras: in a checkout by their name, elsewhere by their requirements."""

from __future__ import annotations

import re
from pathlib import Path

IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").is_file()
_EXTRA = re.compile(r"(?:make setup-\S+, or )?pip install -e \.\[(\w+)\]")
# "vllm>=0.24; extra == \"vllm\"": the requirement, and the extra that adds it.
_REQUIREMENT = re.compile(r"(?P<package>[^;]+?) *;.*extra == [\"'](?P<extra>\w+)[\"']")


def install_command(command: str) -> str:
    """Return `command` (`pip install -e .[extra]`, perhaps after `make setup-extra, or`) for this installation.

    Outside of a checkout it names the requirements of the extra: the name of this package could be that of another one
    on the package index.
    """
    match = _EXTRA.fullmatch(command)
    if IN_CHECKOUT or match is None:
        return command
    packages = requirements_of(match[1])
    return f"pip install {' '.join(packages)}" if packages else command


def requirements_of(extra: str) -> list[str]:
    """Return the quoted requirements that an extra of the installed package adds."""
    import importlib.metadata  # --help need not import it

    try:
        declared = importlib.metadata.requires("verl") or ()
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH only
        return []
    matches = (_REQUIREMENT.fullmatch(text) for text in declared)
    return [f'"{match["package"]}"' for match in matches if match is not None and match["extra"] == extra]
