"""Imported by workers (`external_libs`): notes when every call on the compute lane begins and ends.

A line of JSON per call goes to the file named by WORKER_CLOCK. What lies between the calls, the device waits.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.single_controller.base.worker import Worker

_untimed = Worker._compute_call


@contextmanager
def _timed(self: Worker, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    begin = time.time()
    try:
        with _untimed(self, method, *args, **kwargs):
            yield
    finally:
        line = json.dumps({"method": method, "rank": self.rank, "begin": begin, "end": time.time()})
        with open(os.environ["WORKER_CLOCK"], "a", encoding="utf-8") as out:
            out.write(line + "\n")


if "WORKER_CLOCK" in os.environ:
    Worker._compute_call = _timed
