"""The native engine with a child process and shared memory, as third-party engines have, and a device error."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from verl.types.request import Output, Request
from verl.workers.rollout.native_rollout import NativeRollout

FAILING_REQUEST = "fail the device"
"""ID of the request that raises a device error."""
_FAILURE_DELAY_S = 0.5


class BreakingRollout(NativeRollout):
    def __init__(self, *args: Any) -> None:
        try:
            super().__init__(*args)
        except ValueError:
            sys.stderr.write("output of the engine process\n")
            raise
        self._worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000], name="Worker_TP1")
        self._worker.start()
        self._memory = SharedMemory(f"verl-{os.getpid()}", create=True, size=64)

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        if not any(request.id == FAILING_REQUEST for request in requests):
            return super().submit(requests)
        # Like an error in a step: raised after `submit` has returned and before the requests have finished.
        self.loop.pause("keep")
        futures = super().submit(requests)
        error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        threading.Timer(_FAILURE_DELAY_S, self.loop.fail, [error]).start()
        return futures

    def close(self) -> None:
        super().close()
        self._worker.kill()
        self._worker.join()
