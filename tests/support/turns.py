"""To be named in `external_libs`: a rank that trains, or scores, while its engine takes a step ends the run.

Collectives of two groups, from two threads of a process, may deadlock where a device carries them out one by one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from verl.inference.model_runner import ModelRunner
from verl.workers.engine.common.base_engine import BaseTrainEngine

_lock = threading.Lock()
_begun = _ended = 0


def _counted(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _begun, _ended
        with _lock:
            _begun += 1
        try:
            return launch(*args, **kwargs)
        finally:
            with _lock:
                _ended += 1

    return run


def _alone(work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            begun, ended = _begun, _ended
        result = work(*args, **kwargs)
        with _lock:
            steps = _begun - ended
        if begun != ended or steps:
            raise AssertionError(f"{work.__name__}: the engine took {steps} steps meanwhile")
        return result

    return run


ModelRunner.launch = _counted(ModelRunner.launch)
BaseTrainEngine.forward_backward = _alone(BaseTrainEngine.forward_backward)
BaseTrainEngine.infer = _alone(BaseTrainEngine.infer)
