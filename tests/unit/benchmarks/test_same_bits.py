"""The comparison of two commits: the selection of cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from same_bits import select_cases

KNOWN = ["ppo_critic", "gspo", "sft"]


def test_cases_are_selected_by_name_and_default_to_all():
    assert select_cases(KNOWN, []) == KNOWN
    assert select_cases(KNOWN, ["sft", "ppo_critic"]) == ["ppo_critic", "sft"]


def test_an_unknown_case_is_an_error_with_the_known_names():
    with pytest.raises(SystemExit, match=r"--cases: .*gpso.*ppo_critic, gspo, sft"):
        select_cases(KNOWN, ["gspo", "gpso"])
