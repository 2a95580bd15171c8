"""Imported by workers (`external_libs`): times of their calls, and a device profile of one actor update, by stream.

WORKER_CLOCK names a file to which every call on the compute lane appends two lines of JSON. `"whole": false` is the
method itself: between these intervals the device is idle. `"whole": true` also includes reading the input rows and
storing the results: between these intervals only the controller and the network work.

OVERLAP_PROFILE names the file for the profile of the update with the number OVERLAP_UPDATE: seconds of the update,
seconds in which any stream and in which several streams were busy, and the most expensive kernels of each stream.
Streams other than the training stream belong to generation.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl.single_controller.base.worker import RankHost, Worker

_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]


def covered(spans: Sequence[Span]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def summarize_trace(events: Sequence[dict[str, Any]], wall: float) -> dict[str, Any]:
    """Busy seconds and the most expensive kernels per stream; event times are in microseconds, `wall` in seconds."""
    spans: dict[int, list[Span]] = defaultdict(list)
    kernels: dict[int, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.get("cat") in _DEVICE_EVENTS:
            stream, begin = int(event["args"].get("stream", -1)), event["ts"] / 1e6
            spans[stream].append((begin, begin + event["dur"] / 1e6))
            kernels[stream][event["name"][:60]] += event["dur"] / 1e6
    per_stream = {stream: covered(stream_spans) for stream, stream_spans in spans.items()}
    busy = covered([span for stream_spans in spans.values() for span in stream_spans])
    streams = [
        {"stream": stream, "s": seconds, "events": len(spans[stream]), "kernels": kernels[stream].most_common(5)}
        for stream, seconds in sorted(per_stream.items(), key=lambda pair: -pair[1])
    ]
    return {"wall s": wall, "busy s": busy, "several at once s": sum(per_stream.values()) - busy, "streams": streams}


@contextmanager
def _log_interval(method: str, rank: int, whole: bool) -> Iterator[None]:
    begin = time.time()
    try:
        yield
    finally:
        line = json.dumps({"method": method, "rank": rank, "whole": whole, "begin": begin, "end": time.time()})
        with open(os.environ["WORKER_CLOCK"], "a", encoding="utf-8") as out:
            out.write(line + "\n")


if "WORKER_CLOCK" in os.environ:
    _compute_call, _rank_call = Worker._compute_call, RankHost.call

    @contextmanager
    def _timed_compute_call(self: Worker, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        with _log_interval(method, self.rank, False), _compute_call(self, method, *args, **kwargs):
            yield

    def _timed_rank_call(
        self: RankHost, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str
    ) -> Any:
        if lane != "compute":
            return _rank_call(self, role, method, args, kwargs, lane)
        with _log_interval(method, self._info.rank if self._info else 0, True):
            return _rank_call(self, role, method, args, kwargs, lane)

    Worker._compute_call = _timed_compute_call
    RankHost.call = _timed_rank_call

if "OVERLAP_PROFILE" in os.environ:
    _unprofiled_call = Worker._compute_call
    _updates = 0

    @contextmanager
    def _profiled_compute_call(self: Worker, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        global _updates
        _updates += method == "update_actor"
        if method != "update_actor" or _updates != int(os.environ["OVERLAP_UPDATE"]) or not torch.cuda.is_available():
            with _unprofiled_call(self, method, *args, **kwargs):
                yield
            return
        torch.cuda.current_stream().synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            begin.record()
            with _unprofiled_call(self, method, *args, **kwargs):
                yield
            end.record()
            end.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        summary = summarize_trace(events, begin.elapsed_time(end) / 1e3)
        Path(os.environ["OVERLAP_PROFILE"]).write_text(json.dumps(summary))

    Worker._compute_call = _profiled_compute_call
