"""Malicious requests to the sandbox server while regular clients use it."""

from __future__ import annotations

import json
import time
from urllib.parse import urlsplit

import pytest

from tests.attacks.support.attack import Attack, Pause, Reset, http_request
from tests.attacks.support.attacker import run_attack
from tests.attacks.support.campaign import run_campaign, stored_seeds
from tests.attacks.support.checks import check_figures
from tests.attacks.support.keys import API_KEY, bearer
from tests.attacks.support.programs import SLEEPING
from tests.attacks.support.regular import request
from tests.attacks.support.servers import running_server

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("seed", stored_seeds())
def test_regular_clients_are_served_during_an_attack(seed, tmp_path):
    check_figures(run_campaign("sandbox", seed, tmp_path))


def test_programs_of_disconnected_clients_free_their_slots(tmp_path):
    """More sleeping programs than slots, whose clients disconnect: the next program runs at once."""
    body = json.dumps({"code": SLEEPING, "run_timeout": 60}).encode()
    steps = http_request("POST", "/run_code", body, bearer(API_KEY))
    with running_server("sandbox", tmp_path) as server:
        parts = urlsplit(server.url)
        attack = Attack("disconnect", (*steps, Pause(1.0), Reset()), count=50)
        assert not run_attack(attack, (parts.hostname, parts.port)).problem
        began = time.monotonic()
        result = request(server.url, "POST", "/run_code", {"code": "print(1)"})
        assert result["run_result"]["stdout"] == "1\n"
        assert time.monotonic() - began < 10, "the programs would have slept for 60 s"
        while request(server.url, "GET", "/health")["programs"]:
            assert time.monotonic() - began < 20, "a slot of a disconnected client is still taken"
            time.sleep(0.1)
