"""The tables of docs/scaling.md are what their command prints, of models with the parameters they are known for."""

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


def test_the_page_has_the_table_that_the_command_prints():
    rows = list(table(MODELS["Qwen2.5-7B"], Work(4096, 512, 72 * GB)))
    assert "\n".join(rows) in (ROOT / "docs/scaling.md").read_text()
    assert len(rows) == 2 + 14
