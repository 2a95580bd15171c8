"""Lists of users' classes in YAML files (tools, simulated users): read whole, so that they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.problems import Report
from verl.utils.import_utils import ImportPath

_HOW = "Write pkg.module.Class, or file.py:Class"


@dataclass(frozen=True)
class ClassEntry:
    """One entry of such a list."""

    place: str
    """For messages: the file and the entry."""
    path: ImportPath
    config: dict[str, Any]
    rest: dict[str, Any]
    """Its other keys."""

    def load(self, base: type, report: Report) -> type[Any] | None:
        """The class, or None and a problem in the report."""
        try:
            found = self.path.load()
        except (FileNotFoundError, AttributeError, RuntimeError, ValueError) as error:
            report.problem(f"{self.place}.class_name", str(self.path), told(error), _HOW)
            return None
        if not isinstance(found, type) or not issubclass(found, base):
            why = f"it is no {base.__name__}"
            report.problem(f"{self.place}.class_name", str(self.path), why, f"Name a subclass of {base.__name__}")
            return None
        return found


def read_class_list(key: str, path: str, top: str, known: Sequence[str], report: Report) -> list[ClassEntry]:
    """The entries `{class_name, config, …}` below `top` of a YAML file; `known` are the other keys they may have."""
    found = []
    for number, entry in enumerate(_read_entries(key, path, top, report)):
        place = f"{path}: {top}[{number}]"
        rest = {name: value for name, value in entry.items() if name not in ("class_name", "config")}
        for name in set(rest) - set(known):
            allowed = ", ".join(("class_name", "config", *known))
            report.problem(f"{place}.{name}", rest[name], "unknown key", f"Known: {allowed}")
        config = entry.get("config") or {}
        if not isinstance(config, Mapping):
            report.problem(f"{place}.config", config, "it is no mapping", "Write config: {…}")
            config = {}
        written = entry.get("class_name")
        if not isinstance(written, str):
            report.problem(f"{place}.class_name", written, "it is missing", _HOW)
            continue
        try:
            found.append(ClassEntry(place, ImportPath.read(written), dict(config), rest))
        except (ValueError, FileNotFoundError) as error:
            report.problem(f"{place}.class_name", written, told(error), _HOW)
    return found


def told(error: Exception) -> str:
    """An error's words as part of a sentence."""
    return str(error).rstrip(". ") or type(error).__name__


def yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Line, column and cause of an error in a YAML file, in one line."""
    mark = error.problem_mark or error.context_mark
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1} "
    return f"{place}is not valid YAML: {', '.join(filter(None, (error.context, error.problem)))}"


def _read_entries(key: str, path: str, top: str, report: Report) -> list[Mapping[str, Any]]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except yaml.MarkedYAMLError as error:
        report.problem(key, path, yaml_problem(error), "Correct the file at that line or the one above")
        return []
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        report.problem(key, path, f"cannot be read: {told(error)}", "Correct the file")
        return []
    entries = content.get(top) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        fix = f"Begin it with '{top}:' and list '- class_name: …' below"
        report.problem(key, path, f"it holds no list {top!r} of mappings", fix)
        return []
    return entries
