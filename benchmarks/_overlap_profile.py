"""Imported by workers (`external_libs`): what the device does while one update of the actor runs, by stream.

The update with the number OVERLAP_UPDATE is profiled, and what was found goes to the file OVERLAP_PROFILE as JSON:
seconds of the update, in which any stream had work, in which several had, and for each stream its share and its
costliest kernels. What another stream than training's does meanwhile is generation.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl.single_controller.base.worker import Worker

_unprofiled = Worker._compute_call
_updates = 0
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]


def covered(spans: Sequence[Span]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def summarised(events: Sequence[dict[str, Any]], wall: float) -> dict[str, Any]:
    """Of a trace's events (times in microseconds), `wall` seconds long."""
    spans: dict[int, list[Span]] = defaultdict(list)
    kernels: dict[int, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.get("cat") in _KINDS:
            stream, begin = int(event["args"].get("stream", -1)), event["ts"] / 1e6
            spans[stream].append((begin, begin + event["dur"] / 1e6))
            kernels[stream][event["name"][:60]] += event["dur"] / 1e6
    alone = {stream: covered(found) for stream, found in spans.items()}
    busy = covered([span for found in spans.values() for span in found])
    streams = [
        {"stream": stream, "s": seconds, "events": len(spans[stream]), "kernels": kernels[stream].most_common(5)}
        for stream, seconds in sorted(alone.items(), key=lambda pair: -pair[1])
    ]
    return {"wall s": wall, "busy s": busy, "several at once s": sum(alone.values()) - busy, "streams": streams}


@contextmanager
def _profiled(self: Worker, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    global _updates
    _updates += method == "update_actor"
    if method != "update_actor" or _updates != int(os.environ["OVERLAP_UPDATE"]) or not torch.cuda.is_available():
        with _unprofiled(self, method, *args, **kwargs):
            yield
        return
    torch.cuda.current_stream().synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin.record()
        with _unprofiled(self, method, *args, **kwargs):
            yield
        end.record()
        end.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        found = summarised(json.loads(trace.read_text())["traceEvents"], begin.elapsed_time(end) / 1e3)
    Path(os.environ["OVERLAP_PROFILE"]).write_text(json.dumps(found))


if "OVERLAP_PROFILE" in os.environ:
    Worker._compute_call = _profiled
