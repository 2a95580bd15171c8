"""Joining Ray: where its dashboard is, is said; a cluster that does not answer is an error, or waited for."""

from __future__ import annotations

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


def test_a_cluster_that_does_not_answer_is_waited_for_only_where_it_had(monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RayUnavailableError, match=r"nothing answers at 127\.0\.0\.1:1"):
        start_ray()
    assert "waiting" not in caplog.text
    with pytest.raises(RayUnavailableError):
        start_ray(within=0.5)
    (said,) = [record.message for record in caplog.records if "waiting for it" in record.message]
    assert said.startswith("nothing answers at 127.0.0.1:1: ")
