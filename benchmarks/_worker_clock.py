"""Imported by workers (`external_libs`): notes when every call on the compute lane begins and ends.

A line of JSON per call goes to the file named by WORKER_CLOCK, twice: `method` alone for what the method itself takes,
with `whole` for all that the rank does for the call, reading its rows and storing its results included. What lies
between the former, the device waits; what lies between the latter is the controller's and the wire's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.single_controller.base.rank_host import RankHost
from verl.single_controller.base.worker import Worker

_untimed = Worker._compute_call
_untimed_call = RankHost.call


@contextmanager
def _noted(method: str, rank: int, whole: bool) -> Iterator[None]:
    begin = time.time()
    try:
        yield
    finally:
        line = json.dumps({"method": method, "rank": rank, "whole": whole, "begin": begin, "end": time.time()})
        with open(os.environ["WORKER_CLOCK"], "a", encoding="utf-8") as out:
            out.write(line + "\n")


@contextmanager
def _timed(self: Worker, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    with _noted(method, self.rank, False), _untimed(self, method, *args, **kwargs):
        yield


def _timed_call(self: RankHost, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
    if lane != "compute":
        return _untimed_call(self, role, method, args, kwargs, lane)
    with _noted(method, self._info.rank if self._info else 0, True):
        return _untimed_call(self, role, method, args, kwargs, lane)


if "WORKER_CLOCK" in os.environ:
    Worker._compute_call = _timed
    RankHost.call = _timed_call
