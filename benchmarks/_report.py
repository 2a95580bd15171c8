"""Output of all benchmarks: a table, and a JSON line with information about the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def report(title: str, rows: Sequence[Mapping[str, Any]], json_path: str | os.PathLike[str] | None = None) -> None:
    """Print `rows` (one or more dicts; columns in order of first appearance) as a table, then one JSON line.

    The JSON object is `{"title", "machine", "rows"}`; with `json_path` it is also appended to that file.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    machine = machine_info()
    if sys.stdout.isatty():
        _print_rich(title, columns, cells)
    else:
        _print_plain(title, columns, cells)
    print("machine: " + ", ".join(f"{key}={value}" for key, value in machine.items()))
    line = json.dumps({"title": title, "machine": machine, "rows": [dict(row) for row in rows]}, default=_plain_value)
    print(line, flush=True)
    if json_path is not None:
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


def machine_info() -> dict[str, Any]:
    """Cores, architecture, memory and versions: the context of the measurements."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "arch": platform.machine(),
        "memory_gb": _memory_gb(),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "gpu": _gpu_name(),
    }


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_name() -> str | None:
    # Do not import torch for benchmarks that do not use it.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _plain_value(value: Any) -> Any:
    """numpy and torch scalars as Python numbers; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _print_rich(title: str, columns: list[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in cells:
        table.add_row(*row)
    Console().print(table)


def _print_plain(title: str, columns: list[str], cells: list[list[str]]) -> None:
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *cells]:
        first, *rest = zip(row, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]).rstrip())
