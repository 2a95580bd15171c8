"""Ray's dashboard: where it is, is said at start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl.trainer.common.cluster import start_ray


@pytest.mark.parametrize(("url", "said"), [("127.0.0.1:8265", True), ("", False), (None, False)])
def test_the_address_of_rays_dashboard_is_logged_where_there_is_one(monkeypatch, caplog, url, said):
    """Ray says where it is; the packages of the extra `dashboard` are not part of the tests."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "init", lambda **options: SimpleNamespace(dashboard_url=url))
    with caplog.at_level("INFO"):
        start_ray()
    assert ("Ray dashboard: http://127.0.0.1:8265" in caplog.text) == said
