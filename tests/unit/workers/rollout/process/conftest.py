"""The native engine in this process and, the same one, in a process of its own: one each for a whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.config.names import ROLLOUTS
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.process.process_rollout import ProcessRollout

AT = "tests.support.breaking_engine:BreakingRollout"


@pytest.fixture(scope="module")
def host_native() -> Iterator[None]:
    """For as long as the file's tests run, the native engine is treated as another project's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROLLOUTS, "native", replace(ROLLOUTS["native"], package="torch", import_path=AT))
        yield


@pytest.fixture(scope="module")
def start_hosted(model_path: Path, host_native: None) -> Iterator[Callable[..., ProcessRollout]]:
    """Start the engine in a process of its own; keywords are configuration keys."""
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
    """One for tests that leave it as it was."""
    return start_hosted()
