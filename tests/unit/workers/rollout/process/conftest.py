"""The native engine in a separate process, started once per test file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.config.names import ROLLOUTS
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.process.process_rollout import ProcessRollout

IMPORT_PATH = "tests.support.breaking_engine:BreakingRollout"


@pytest.fixture(scope="module")
def host_native() -> Iterator[None]:
    """Register the native engine as a third-party engine, which runs in a separate process, for one test file."""
    with pytest.MonkeyPatch.context() as patch:
        entry = replace(ROLLOUTS["native"], package="torch", import_path=IMPORT_PATH)
        patch.setitem(ROLLOUTS, "native", entry)
        yield


@pytest.fixture(scope="module")
def start_hosted(model_path: Path, host_native: None) -> Iterator[Callable[..., ProcessRollout]]:
    """Start the engine in a separate process; keywords are configuration keys."""
    started: list[ProcessRollout] = []

    def start(**keys) -> ProcessRollout:
        model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
        rollout = open_rollout(str(model_path), model, as_config(RolloutConfig, {"max_new_tokens": 24, **keys}), "cpu")
        assert isinstance(rollout, ProcessRollout)
        started.append(rollout)
        return rollout

    yield start
    for rollout in started:
        rollout.close()


@pytest.fixture(scope="module")
def hosted(start_hosted: Callable[..., ProcessRollout]) -> ProcessRollout:
    """An engine shared by tests that do not change its state."""
    return start_hosted()
