"""The notebooks are what their sources say, and their cells run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.commands import ROOT
from tests.support.doc_scripts import load_script
from tests.support.document_runner import PageRun

SOURCES = sorted((ROOT / "examples/notebooks").glob("*.py"))
notebooks = load_script("notebooks.py")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_source_and_stored_outputs(source):
    stored = json.loads(source.with_suffix(".ipynb").read_text())
    outputs = notebooks.outputs_of(source.with_suffix(".ipynb"))
    assert stored == notebooks.notebook(source.read_text(), outputs), "run: make docs-pages"
    assert any(outputs.values()), "run: python docs/scripts/notebooks.py --execute"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(source, tmp_path):
    page = PageRun(tmp_path / "page")
    code = notebooks.code_of(source.with_suffix(".ipynb"))
    environment = {**page.environment, "RAY_ADDRESS": "local", "HF_HOME": os.environ.get("HF_HOME", str(tmp_path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=page.folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_cells_share_a_namespace_and_outputs_are_stored():
    source = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\nprint(x)\n\n# %%\n"
    source += "class Picture:\n    def _repr_svg_(self):\n        return f'<svg>{x}</svg>'\n\n\nPicture()\n"
    assert notebooks.cells_of(source)[0] == ("markdown", "# Title\n\ntext")
    printed, picture = notebooks.execute(source).values()
    assert printed == [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    assert picture[0]["data"] == {"image/svg+xml": ["<svg>1</svg>"]}
