"""For `external_libs`: raises an error if a training engine works while the rollout engine of its process runs a step.

Collectives of two process groups from two threads may deadlock on a device that runs them one after the other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from verl.inference.model_runner import ModelRunner
from verl.workers.engine.common.base_engine import BaseTrainEngine

_lock = threading.Lock()
_started = _finished = 0


def _count_steps(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _started, _finished
        with _lock:
            _started += 1
        try:
            return launch(*args, **kwargs)
        finally:
            with _lock:
                _finished += 1

    return run


def _require_no_steps(work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            started, finished = _started, _finished
        result = work(*args, **kwargs)
        with _lock:
            steps = _started - finished
        if started != finished or steps:
            raise AssertionError(f"{work.__name__}: the engine ran {steps} steps at the same time")
        return result

    return run


ModelRunner.launch = _count_steps(ModelRunner.launch)
BaseTrainEngine.forward_backward = _require_no_steps(BaseTrainEngine.forward_backward)
BaseTrainEngine.infer = _require_no_steps(BaseTrainEngine.infer)
