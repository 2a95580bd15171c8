"""JSON values of recorded tables: columns, merged responses, tracks of the timeline, series of engines and devices."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MAX_SPANS = 20_000
_MAX_POINTS = 600
_MEMORY, _SUPERVISED_MEMORY = "memory_gb/", "perf/memory_allocated_gb_max"
# The phase of memory plans that corresponds to `_SUPERVISED_MEMORY`.
_SUPERVISED_PHASE = "sft"
_Span = tuple[str, float, float, int]
"""Phase, start, end, step."""


def numbers(values: pa.Array | pa.ChunkedArray) -> list[float | int | None]:
    """Numbers of a column; null, NaN and infinite values are None. 32-bit values have their shortest decimal form."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_integer(values.type):
        return values.to_pylist()
    array = values.to_numpy(zero_copy_only=False)
    finite = np.isfinite(array)
    if array.dtype == np.float32:
        array = array.astype("U16").astype(np.float64)
    if finite.all():
        return array.tolist()
    return [value if valid else None for value, valid in zip(array.tolist(), finite.tolist(), strict=True)]


def column_lists(table: pa.Table) -> dict[str, list[Any]]:
    """The columns of a table as lists; NaN becomes None."""
    is_float = {field.name: pa.types.is_floating(field.type) for field in table.schema}
    return {
        name: numbers(table[name]) if is_float[name] else [_finite(value) for value in table[name].to_pylist()]
        for name in table.column_names
    }


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as full key → value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def merge_responses(
    rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], trained: Sequence[int]
) -> list[dict[str, Any]]:
    """Merge the rows of each response (agents may have several): turns in order, numbers of tokens added.

    `lengths`, `trained`: tokens of each row, and how many of them are trained on.
    """
    responses: dict[int, dict[str, Any]] = {}
    for row, length, count in zip(rows, lengths, trained, strict=True):
        turns = row["turns"] or []
        response = responses.get(row["sample_index"])
        if response is None:
            skipped = ("prompt", "part", "turns", "rewards")
            response = {name: value for name, value in row.items() if name not in skipped}
            response |= {"turns": [], "parts": 0, "length": 0, "trained": 0, "rewards": dict(row["rewards"] or ())}
            responses[row["sample_index"]] = response
        response["turns"] += [{**turn, "part": row["part"]} for turn in turns]
        response["parts"] += 1
        response["length"] += length
        response["trained"] += count
        response["finish_reason"] = row["finish_reason"]
    return list(responses.values())


# -------------------------------------------------------------------- timeline


def tracks(phases: pa.Table, events: pa.Table, first: int, last: int) -> dict[str, Any]:
    """The phases of steps `first` to `last`. Times are relative to `origin`, in seconds."""
    step = phases["step"]
    chosen = phases.filter(pc.and_(pc.greater_equal(step, first), pc.less_equal(step, last)))
    total = len(chosen)
    rows = chosen.slice(max(0, total - _MAX_SPANS)).to_pylist()
    if not rows:
        return {"origin": None, "tracks": [], "waits": [], "events": [], "left_out": 0, "end": 0}
    origin, end = min(row["start"] for row in rows), max(row["end"] for row in rows)
    by_track: dict[str, list[_Span]] = defaultdict(list)
    for row in rows:
        by_track[row["track"]].append((row["phase"], row["start"] - origin, row["end"] - origin, row["step"]))
    times = events["time"]
    near = events.filter(pc.and_(pc.greater_equal(times, origin), pc.less_equal(times, end))).to_pylist()
    return {
        "origin": origin,
        "end": end - origin,
        "tracks": [
            {"track": name, "spans": sorted(by_track[name], key=lambda span: (span[1], -span[2])),
             "idle": max(0.0, 1 - busy_seconds(by_track[name]) / max(end - origin, 1e-9))}
            for name in sorted(by_track, key=_track_order)
        ],
        "waits": waits(by_track),
        "events": [{**event, "time": event["time"] - origin} for event in near],
        "left_out": max(0, total - _MAX_SPANS),
    }  # fmt: skip


def busy_seconds(spans: list[_Span]) -> float:
    """Seconds covered by at least one span."""
    total, covered_to = 0.0, -np.inf
    for _, start, end, _ in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def waits(by_track: dict[str, list[_Span]]) -> list[dict[str, Any]]:
    """For every step and phase that several tracks of one role ran: the slowest track, and how long the others waited.

    A track's wait is the time from the end of its last call of the phase to the end of the slowest track's.
    """
    ends: dict[tuple[int, str, str], dict[str, float]] = defaultdict(dict)
    for track, spans in by_track.items():
        role, _, rank = track.rpartition("/")
        for phase, _, end, step in spans:
            if rank:
                key = (step, role, phase)
                ends[key][track] = max(end, ends[key].get(track, end))
    entries = []
    for (step, role, phase), by_name in ends.items():
        if len(by_name) > 1:
            slowest = max(by_name, key=lambda track: by_name[track])
            others = [by_name[slowest] - end for track, end in by_name.items() if track != slowest]
            mean, longest = float(np.mean(others)), float(max(others))
            entries.append(
                {"step": step, "role": role, "phase": phase, "slowest": slowest, "mean": mean, "longest": longest}
            )
    return sorted(entries, key=lambda wait: (wait["step"], -wait["mean"]))


def memory(events: pa.Table, metrics: pa.Table) -> dict[str, Any]:
    """Planned and largest measured GB of tensors per device by phase; None where one of them is unknown.

    `metrics`: the columns for which `is_memory` holds. `device_gb` in the result: memory of a device, None if unknown.
    """
    plans = events.filter(pc.equal(events["kind"], "memory_plan"))["data"].to_pylist()
    plan = json.loads(plans[-1]) if plans else {"gb": {}, "device_gb": None}
    largest = {name: pc.max(metrics[name]).as_py() for name in metrics.column_names}
    measured = {_SUPERVISED_PHASE if name == _SUPERVISED_MEMORY else name.removeprefix(_MEMORY): value
                for name, value in largest.items()}  # fmt: skip
    phases = [
        {"phase": phase, "planned": plan["gb"].get(phase), "measured": measured.get(phase)}
        for phase in dict.fromkeys([*plan["gb"], *measured])
    ]
    return {"device_gb": plan["device_gb"], "phases": phases}


def is_memory(metric: str) -> bool:
    """Whether a metric is the memory of tensors in a phase."""
    return metric == _SUPERVISED_MEMORY or metric.startswith(_MEMORY)


def series(engines: pa.Table, devices: pa.Table) -> dict[str, Any]:
    """Engine and device series with at most some hundred points each: name of the engine or device → columns."""
    engine_columns = ("time", "running", "waiting", "tokens_per_s", "kv_used", "preemptions")
    device_columns = ("time", "memory_used", "memory_total", "memory_tensors", "utilization", "power")
    return {
        "engines": _split(engines, "engine", engine_columns),
        "devices": _split(devices, "device", device_columns),
    }


def _split(table: pa.Table, name: str, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    entries = []
    for value in sorted(set(table[name].to_pylist()), key=_track_order):
        rows = table.filter(pc.equal(table[name], value))
        rows = rows.take(np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MAX_POINTS)).astype(int)))
        entry = {"name": value, "columns": {column: numbers(rows[column]) for column in columns}}
        if name == "device":
            entry["tracks"] = rows["tracks"][-1].as_py()
        entries.append(entry)
    return entries


def _track_order(track: str) -> tuple[Any, ...]:
    """The controller first, then ranks, then engines, each by number."""
    kind = 0 if track == "controller" else 2 if track.startswith("engine/") else 1
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", track)]
