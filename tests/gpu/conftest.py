"""A Ray node with the machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_gpu() -> Iterator[None]:
    """Started on first use. A session cannot use `ray_cluster`, too: that node has no GPU."""
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=2 * 1024**3)
    yield
    ray.shutdown()
