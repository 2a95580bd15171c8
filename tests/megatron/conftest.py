"""Megatron-Core on the CPU, here and in every process that a test starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SHIM = Path(__file__).parent / "shims" / "sitecustomize.py"
collect_ignore_glob = [] if find_spec("megatron") else ["test_*"]  # not installed: make setup-megatron


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray node on which four ranks and the programs beside them find room."""
    import ray

    ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 1024**2)
    yield
    ray.shutdown()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    here = [item for item in items if Path(item.path).is_relative_to(Path(__file__).parent)]
    for item in here:
        item.add_marker(pytest.mark.megatron)


if str(SHIM.parent) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM.parent), os.environ.get("PYTHONPATH")]))
if getattr(sys.modules.get("sitecustomize"), "__file__", None) != str(SHIM):
    spec = spec_from_file_location("megatron_on_cpu", SHIM)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
