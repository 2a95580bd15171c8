"""Joining Ray: where its dashboard is, is said; a cluster that does not answer is an error, or waited for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from verl.trainer.common.ray_cluster import start_ray
from verl.trainer.recovery.ray_monitor import RayUnavailableError


@pytest.mark.parametrize(("url", "said"), [("127.0.0.1:8265", True), ("", False), (None, False)])
def test_the_address_of_rays_dashboard_is_logged_where_there_is_one(monkeypatch, caplog, url, said):
    """Ray says where it is; the packages of the extra `dashboard` are not part of the tests."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "init", lambda **options: SimpleNamespace(dashboard_url=url))
    with caplog.at_level("INFO"):
        start_ray()
    assert ("Ray dashboard: http://127.0.0.1:8265" in caplog.text) == said


def test_workers_of_a_local_cluster_inherit_the_variables(monkeypatch):
    """With a `runtime_env`, every worker would be started by another process, and none in advance."""
    import ray

    during: dict[str, str | None] = {}

    def init(**options: object) -> SimpleNamespace:
        assert "runtime_env" not in options
        during.update({name: os.environ.get(name) for name in ("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "HF_ENDPOINT")})
        return SimpleNamespace(dashboard_url=None)

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(ray, "init", init)
    start_ray()
    assert during == {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "true", "HF_ENDPOINT": "http://mirror"}
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_cluster_that_does_not_answer_is_waited_for_only_where_it_had(monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RayUnavailableError, match=r"127\.0\.0\.1:1: .*ray stop"):
        start_ray()
    assert "waiting" not in caplog.text
    with pytest.raises(RayUnavailableError):
        start_ray(within=0.5)
    (said,) = [record.message for record in caplog.records if "waiting for it" in record.message]
    assert said.startswith("nothing answers at 127.0.0.1:1: ")
