"""Runs every test on every installed rollout engine; prints a table of the outcomes by test and engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engines import ENGINES, MODELS, EngineRow, installed
from tests.engines.table import table
from tests.support.tiny import save_tiny_model

_RESULTS: dict[tuple[str, str], tuple[str, str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", action="append", help="Run the tests on this engine only; may be repeated.")


def pytest_configure() -> None:
    """Put the shims of missing packages on the import path of this process and of those that tests start."""
    replaceable = [ENGINES[name].shims_for for name in installed() if ENGINES[name].shims_for]
    if any(find_spec(package) is None for package in replaceable):
        shims = str(Path(__file__).parent / "shims")
        sys.path.insert(0, shims)
        os.environ["PYTHONPATH"] = os.pathsep.join([shims, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine_name" in metafunc.fixturenames:
        names = metafunc.config.getoption("--engine") or installed()
        metafunc.parametrize("engine_name", names, scope="session")


@pytest.fixture(scope="session")
def row(engine_name: str) -> EngineRow:
    os.environ.update(ENGINES[engine_name].environment)
    return ENGINES[engine_name]


def pytest_runtest_setup(item: pytest.Function) -> None:
    """`@pytest.mark.needs("…")`: skip the test on engines without this feature, before its fixtures are set up."""
    for marker in item.iter_markers("needs"):
        reason = ENGINES[item.callspec.params["engine_name"]].cannot.get(marker.args[0])
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model of `MODELS`, which is saved on first use."""
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = save_tiny_model(tmp_path_factory.mktemp(kind), **MODELS[kind])
        return folders[kind]

    return folder


class RunningEngine:
    """Keeps one running engine. It is closed before another starts: some engines cannot run twice in a process."""

    def __init__(self) -> None:
        self.key: Any = None
        self.engine: Any = None

    def get(self, key: Any, start: Callable[[], Any]) -> Any:
        """Return the running engine if it was started with this key; otherwise start one."""
        if self.key != key:
            self.close()
            self.engine, self.key = start(), key
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = self.key = None


@pytest.fixture(scope="session")
def running_engine() -> Iterator[RunningEngine]:
    running = RunningEngine()
    yield running
    running.close()


@pytest.fixture
def start(
    engine_name: str, row: EngineRow, model_folder: Callable[[str], Path], running_engine: RunningEngine
) -> Callable[..., Any]:
    """Start the engine in this process, or reuse it with its initial weights; keywords are configuration keys."""
    from tests.support.tiny import tiny_model
    from verl.config import ModelConfig, RolloutConfig, as_config
    from verl.workers.rollout import get_rollout_class

    def start_engine(kind: str = "plain", **keys: Any) -> Any:
        path = str(model_folder(kind))
        defaults = {"name": engine_name, "max_new_tokens": 24, "max_model_len": 512, "free_weights": False}
        settings = {**defaults, **row.keys, **keys}

        def build() -> Any:
            model = as_config(ModelConfig, {"path": path}, "actor_rollout_ref.model")
            return get_rollout_class(engine_name)(path, model, as_config(RolloutConfig, settings))

        engine = running_engine.get((engine_name, kind, repr(keys)), build)
        engine.resume()
        engine.pause_generation("abort")  # requests that a failed test left running
        engine.resume_generation()
        if engine.version:
            engine.update_weights(tiny_model(**MODELS[kind]).state_dict().items(), version=0)
        return engine

    return start_engine


# ---------------------------------------------------------------- the table


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if "engine_name" in parameters and (report.when == "call" or report.outcome != "passed"):
        name = item.nodeid.split("::")[-1].partition("[")[0]
        key = f"{item.path.stem.removeprefix('test_')}: {name.removeprefix('test_')}", parameters["engine_name"]
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
        severities = ["passed", "skipped", "failed"]
        previous = _RESULTS.get(key, ("passed", ""))
        _RESULTS[key] = max(previous, (report.outcome, reason), key=lambda result: severities.index(result[0]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _RESULTS:
        terminalreporter.write_line("")
        terminalreporter.write_line(table(_RESULTS))
    if "ENGINE_RESULTS" in os.environ:
        results = [[*key, *outcome] for key, outcome in _RESULTS.items()]
        Path(os.environ["ENGINE_RESULTS"], f"{os.getpid()}.json").write_text(json.dumps(results))
