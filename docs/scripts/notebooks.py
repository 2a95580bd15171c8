"""Notebooks from Python files with `# %%` cells: `make docs-pages` runs it.

    python docs/scripts/notebooks.py                  write examples/notebooks/*.ipynb, keep outputs of unchanged cells
    python docs/scripts/notebooks.py --execute FILE   also execute the cells of FILE.py and store their outputs

`code_of(notebook)` is the program of its code cells, which a test of the slow tier executes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples/notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def cells_of(source: str) -> list[tuple[str, str]]:
    """(kind, text) of every cell: kind is `markdown` or `code`."""
    cells = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        if title.strip() == "[markdown]":
            cells.append(("markdown", re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)))
        else:
            cells.append(("code", text.strip()))
    return cells


def notebook(source: str, outputs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The notebook of a Python file; `outputs` of code cells by their text."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells_of(source)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines(text)}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": outputs.get(text, [])}
        cells.append(cell)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def outputs_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The stored outputs of a notebook by the text of their cell."""
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    return {"".join(cell["source"]): cell["outputs"] for cell in cells if cell["cell_type"] == "code"}


def code_of(path: Path) -> str:
    """The code cells of a notebook as one program."""
    return "\n\n".join(outputs_of(path))


def execute(source: str) -> dict[str, list[dict[str, Any]]]:
    """Run the code cells in one namespace; return their printed text and pictures."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = {}
    for kind, text in cells_of(source):
        if kind == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = run_cell(text, namespace)
            outputs[text] = cell_outputs(printed.getvalue(), value)
    return outputs


def run_cell(text: str, namespace: dict[str, Any]) -> Any:
    """Execute a cell; return the value of its last line if that is an expression."""
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)


def cell_outputs(printed: str, value: Any) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    printed = printed.replace(f"{FOLDER.parents[1]}/", "")  # no paths of this machine
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed)})
    if hasattr(value, "_repr_svg_"):
        picture = {"image/svg+xml": lines(value._repr_svg_())}
        outputs.append({"output_type": "display_data", "data": picture, "metadata": {}})
    return outputs


def write(path: Path, executed: bool = False) -> None:
    target, source = path.with_suffix(".ipynb"), path.read_text()
    outputs = execute(source) if executed else outputs_of(target)
    target.write_text(json.dumps(notebook(source, outputs), indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--execute", type=Path, metavar="FILE", help="a file of examples/notebooks")
    options = parser.parse_args()
    for path in sorted(FOLDER.glob("*.py")):
        write(path, executed=options.execute is not None and options.execute.resolve() == path)


if __name__ == "__main__":
    main()
