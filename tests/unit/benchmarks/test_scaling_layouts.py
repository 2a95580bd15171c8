"""The layouts of docs/guides/large_models.md are those of their command, of models with their known parameters."""

from __future__ import annotations

import pytest

from benchmarks.scaling_layouts import MODELS, Work, active_parameters, table
from tests.support.commands import ROOT
from verl.planning.phases import GB

BILLIONS = {
    "Qwen2.5-7B": (7.6, 7.6),
    "Qwen2.5-32B": (32.8, 32.8),
    "Qwen2.5-72B": (72.7, 72.7),
    "Qwen3-235B-A22B": (235, 22),
    "DeepSeek-V3-671B": (671, 37),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_parameters_that_they_are_known_for(name):
    core = MODELS[name]
    found = core.parameters / 1e9, active_parameters(core) / 1e9
    assert found == pytest.approx(BILLIONS[name], rel=0.015)


@pytest.mark.slow
def test_the_layouts_of_the_guide_are_those_that_the_command_prints():
    page = (ROOT / "docs/guides/large_models.md").read_text()
    section = page.partition("| model | GPUs | layout |")[2].partition("\n\n")[0]
    documented = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines()[2:]]
    assert len(documented) == 6
    for model, gpus, layout, total in documented:
        rows = [line.strip("| ").split(" | ") for line in table(MODELS[model], Work(4096, 512, 72 * GB))]
        assert len(rows) == 2 + 14
        assert [row[8] for row in rows if row[:2] == [gpus, layout.replace("FSDP", "fsdp")]] == [total]
