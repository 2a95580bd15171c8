"""Weights that go through Megatron-Bridge are those of our own tables, bit for bit; what it cannot map is refused.

Transformer Engine and triton, which it imports, are stand-ins of the shim here: nothing of them computes anything.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engine_cases import run_ranks
from tests.support.mbridge_ranks import IMPORT_ERRORS, UNSUPPORTED_MODELS, check_fallbacks, compare_with_bridge
from tests.support.megatron_ranks import RANKS, WEIGHTS_ONLY

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="no megatron-bridge: make setup-megatron"),
]
ALONE = [("one rank", model) for model in ("qwen2", "tied", "qwen3", "window", "unnormalized")]
# 261 words are padded to 512 on two tensor ranks; the tied head of the last stage is a copy of the first's.
TOGETHER = [
    ("TP2", "tied"),
    ("TP2 PP2", "tied"),
    ("VPP2", "qwen2"),
    ("TP2", "value"),
    ("TP2 EP2", "unnormalized"),
    ("PP2 EP2", "unnormalized"),
    ("TP2 EP2 ETP2", "unnormalized"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the cases of one rank, or of several: what their ranks found."""
    known: dict[int, Path] = {}

    def of(layout: str) -> Path:
        ranks = 1 if layout == "one rank" else RANKS
        if ranks not in known:
            known[ranks] = tmp_path_factory.mktemp(f"mbridge-{ranks}")
            run_ranks(compare_with_bridge, known[ranks], ALONE if ranks == 1 else TOGETHER, ranks=ranks)
        return known[ranks]

    return of


@pytest.mark.parametrize(("layout", "model"), ALONE + TOGETHER)
def test_what_it_loads_hands_over_and_exports_is_what_we_do(layout: str, model: str, folder: Any) -> None:
    place = folder(layout)
    files = sorted(place.glob("results-*.pt"))
    assert len(files) == (1 if layout == "one rank" else RANKS)
    for file in files:
        case = torch.load(file)[layout, model]
        assert case.pop("used")
        assert len(case) == 11 + (layout != WEIGHTS_ONLY)
        assert not any(case.values()), case
    theirs, ours = (
        load_file(place / f"{layout}-{model}" / whose / "model.safetensors") for whose in ("bridge", "ours")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_models_it_does_not_map_are_refused_before_weights_are_read_and_without_it_ours_does(tmp_path: Path) -> None:
    run_ranks(check_fallbacks, tmp_path, ranks=1)
    found = torch.load(tmp_path / "results-0.pt")
    for name in UNSUPPORTED_MODELS:
        assert "megatron_config.use_mbridge" in found[name]
        assert "use_mbridge=False" in found[name]
    assert "mixtral" in found["mixtral"]
    assert "decoder.layers.1.mlp.linear_fc1.weight" in found["experts"]  # a dense layer between sparse ones
    assert found["ours"] == []
    assert len(found["messages"]) == len(IMPORT_ERRORS)
    for message, error in zip(found["messages"], IMPORT_ERRORS, strict=True):
        assert str(error) in message
        assert "using the built-in weight mapping" in message
    assert "no safetensors files" in found["no files"]
