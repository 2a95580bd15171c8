"""Configuration of all tests; one Ray cluster per session, started on first use and stopped at the end."""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "VERL_CACHE" not in os.environ:  # otherwise tokens of test data would remain in the user's cache
    os.environ["VERL_CACHE"] = tempfile.mkdtemp(prefix="verl-test-cache-")
    atexit.register(shutil.rmtree, os.environ["VERL_CACHE"], ignore_errors=True)
# Tests start their own cluster: never join one that runs on this machine, or connect to the address of a dead one.
os.environ["RAY_ADDRESS"] = "local"

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several workers: each uses its share of the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI checks the same examples every time, other machines draw new ones. No deadline: the duration of an example depends
# on the machine.
hypothesis.settings.register_profile(
    "verl",
    deadline=None,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
hypothesis.settings.load_profile("verl")

# Worker classes of the tests must also be importable in the processes that Ray starts.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

TESTS = Path(__file__).parent

# Independent of the machine: all tests must schedule on a node with 2 CPUs.
RAY_CPUS = 2


# Folders in which all tests have this mark.
MARKED_FOLDERS = {
    "distributed": "processes",
    "attacks": "slow",
    "engines": "engines",
    "megatron": "megatron",
    "gpu": "gpu",
}

# Matches files that use the Ray cluster: by its fixture, a fixture of tests/distributed that requests it, or an import.
_USES_RAY = re.compile(r"ray_cluster|cpu_pool|counters|single_controller\.ray")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files that may contain tests selected by `-m`: importing all files takes most of a minute."""
    marks = config.option.markexpr
    relative = collection_path.relative_to(TESTS).parts if collection_path.is_relative_to(TESTS) else ()
    if relative and re.search(rf"\bnot {MARKED_FOLDERS.get(relative[0], '(?!)')}\b", marks):
        return True
    if collection_path.suffix != ".py" or not re.search(r"(?<!not )\bprocesses\b", marks):
        return None
    return None if _may_start_processes(collection_path) else True


def _may_start_processes(path: Path) -> bool:
    return "distributed" in path.parts or re.search(r"mark\.processes|ray_cluster", path.read_text()) is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while files are imported, and never search later in what they created: a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marks implied by folders and fixtures. Other tests that start processes carry the mark `processes`."""
    for item in items:
        if "distributed" in item.path.parts or "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
        if "engines" in item.path.parts:
            item.add_marker(pytest.mark.engines)
        if item.get_closest_marker("processes") is not None and not _may_start_processes(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} is marked `processes`, but its file names neither `ray_cluster` nor `mark.processes`: "
                "`-m processes` would not collect the file. Mark the test with @pytest.mark.processes there."
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile -m processes`, run all files that use the Ray cluster in one pytest worker."""
    if config.option.dist != "loadfile" or not re.search(r"(?<!not )\bprocesses\b", config.option.markexpr):
        return None
    from xdist.scheduler import LoadFileScheduling

    class RayInOneProcess(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = config.rootpath / nodeid.partition("::")[0]
            return "ray" if _USES_RAY.search(file.read_text()) else super()._split_scope(nodeid)

    return RayInOneProcess(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` on machines without a GPU, also if they are selected by path."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Restore the logger `verl` after a test: commands log to the captured stderr, which closes with the test."""
    logger = logging.getLogger("verl")
    before = (logger.level, list(logger.handlers), logger.propagate)
    yield
    logger.level, logger.handlers, logger.propagate = before
    logger.manager._clear_cache()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray node with 2 CPUs."""
    import ray

    ray.init(
        num_cpus=RAY_CPUS, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 1024**2
    )
    yield
    ray.shutdown()
