"""Malicious requests to the inference server while regular clients use it."""

from __future__ import annotations

import pytest

from tests.attacks.support.campaign import run_campaign, stored_seeds
from tests.attacks.support.checks import check_figures

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("seed", stored_seeds())
def test_regular_clients_are_served_during_an_attack(seed, tmp_path):
    check_figures(run_campaign("inference", seed, tmp_path))
