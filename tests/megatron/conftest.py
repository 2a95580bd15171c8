"""Megatron-Core on the CPU, in this process and those that tests start; a table of gaps to FSDP on one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SHIM = Path(__file__).parent / "shims" / "sitecustomize.py"


def _installed() -> bool:
    """Whether Megatron-Core is installed (make setup-megatron). `import megatron` may also find this folder."""
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


INSTALLED = _installed()
collect_ignore_glob = [] if INSTALLED else ["test_*"]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray node with CPUs for four ranks and the other actors of a run."""
    import ray

    ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 1024**2)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """(layout, model) of the selected tests of a module: its ranks start once and compute only these cases."""
    here = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys((params["layout"], params["model"]) for params in here if "model" in params))


@pytest.fixture
def gap(request: pytest.FixtureRequest) -> Any:
    """`gap(quantity, value)`: record a difference for the table and require that it is at most 1e-5."""

    def record(quantity: str, value: float) -> None:
        layout, model = (request.node.callspec.params[name] for name in ("layout", "model"))
        request.node.user_properties.append(("gap", (layout, model, quantity, value)))
        assert value <= 1e-5, quantity

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The largest gap to FSDP on one rank, by layout, model and quantity."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    gaps: dict[tuple[str, str], dict[str, float]] = {}
    for report in reports:
        for layout, model, quantity, value in (gap for name, gap in report.user_properties if name == "gap"):
            row = gaps.setdefault((layout, model), {})
            row[quantity] = max(value, row.get(quantity, 0.0))
    if not gaps:
        return
    quantities = list(dict.fromkeys(quantity for row in gaps.values() for quantity in row))
    terminalreporter.section("largest gap to FSDP on one rank, float32")
    terminalreporter.line(f"{'layout':22}{'model':14}" + "".join(f"{quantity:>16}" for quantity in quantities))
    for (layout, model), row in gaps.items():
        shown = (f"{row[quantity]:16.1e}" if quantity in row else " " * 16 for quantity in quantities)
        terminalreporter.line(f"{layout:22}{model:14}" + "".join(shown).rstrip())


def pytest_collection_modifyitems(items: list[Any]) -> None:
    here = [item for item in items if Path(item.path).is_relative_to(Path(__file__).parent)]
    for item in here:
        item.add_marker(pytest.mark.megatron)


if INSTALLED and str(SHIM.parent) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM.parent), os.environ.get("PYTHONPATH")]))
if INSTALLED and getattr(sys.modules.get("sitecustomize"), "__file__", None) != str(SHIM):
    spec = spec_from_file_location("megatron_on_cpu", SHIM)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
