"""ViewedRun: everything that the pages show about one recorded run, as values that can be encoded as JSON.

Server and export use the same queries (`QUERIES`). Reads are column reads of single step files, so their cost does not
depend on the length of the run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.recording import Recording, RecordingError, health, read, schema
from verl.recording.reader import StepStream
from verl.viewer import values
from verl.viewer.values import column_lists, flatten, merge_responses, numbers

_Result = TypeVar("_Result")

_TOKEN_FIELDS = (
    "mask", "rollout_log_probs", "trainer_log_probs", "ref_log_probs", "teacher_log_probs", "entropy", "values",
    "advantages", "weights", "versions", "token_scores",
)  # fmt: skip
_ANSWER_FIELDS = (
    "sample_index", "part", "data_source", "prompt", "messages", "turns", "score", "rewards", "reward_info",
    "ground_truth", "finish_reason", "status", "agent", "extra",
)  # fmt: skip
_ROW_TOKEN_FIELDS = ("mask", "trainer_log_probs", "loss_weights")
_ROW_FIELDS = ("uid", "prompt", "loss", "trained_tokens", "tokens", "recorded")
_PAIR_FIELDS = (
    "uid", "prompt", "chosen_score", "rejected_score", "margin", "correct", "loss", "preference", "required_margin",
    "weight", "prompt_tokens", "chosen_tokens", "rejected_tokens", "recorded",
)  # fmt: skip
_VALIDATION_FIELDS = (
    "step", "sample_index", "prompt", "response", "turns", "score", "correct", "rewards", "reward_info", "ground_truth",
    "length", "finish_reason", "status",
)  # fmt: skip
_GROUP_FIELDS = tuple(field.name for field in schema.STREAMS["groups"].fields if field.name != "step")
_FILES = tuple(stream.path for stream in schema.STREAMS.values() if stream.layout == "lines")
_STEP_STREAMS = tuple(stream.name for stream in schema.STREAMS.values() if stream.layout == "steps")
_FOLDERS = tuple(schema.STREAMS[name].path for name in _STEP_STREAMS)
# A run without an `end` event counts as running until nothing has been recorded for this time.
_SILENT_S = 900.0
_MAX_PROMPT_CHARS = 160
# Characters around a search hit.
_EXCERPT_CHARS = 60


class ViewedRun:
    """One recording. Thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        self._recording: Recording = read(folder)
        self.folder, self._name = self._recording.folder, str(folder)
        self._lock = threading.RLock()
        self._cache: dict[tuple[str, int], tuple[int, Any]] = {}
        """By name and step: modification time of the step's file, and what was computed from it."""
        self._health: tuple[tuple[int, ...], list[health.Finding]] | None = None
        """Minute and state of the recording, and its findings."""
        self._health_cache: health.Cache = {}

    def state(self) -> tuple[int, ...]:
        """Return a value that changes whenever something is recorded."""
        return tuple(_stamp(self.folder / name) for name in (*_FILES, *_FOLDERS, schema.RUN_FILE))

    # ---------------------------------------------------------------- queries: JSON values

    def summary(self) -> dict[str, Any]:
        """Names, state and recorded steps of the run."""
        with self._lock:
            run, recorded = self._recording.run, self._recording
            metrics = recorded.metrics.table(["step", "time"])
            events = recorded.events.table(["time", "kind", "message"]).to_pylist()
            steps = metrics["step"].to_pylist()
            names = ("program", "project", "experiment", "verl", "texts")
            return {name: run.get(name) for name in names} | {
                "folder": self._name,
                "last_step": steps[-1] if steps else None,
                "start": events[0]["time"] if events else None,
                "attempts": [attempt._asdict() for attempt in recorded.attempts],
                "steps": {name: getattr(recorded, name).steps for name in _STEP_STREAMS},
                **self._status(events),
            }

    def metrics(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """The names of all metrics, and the columns `names` (default: all), besides `step` and `time`."""
        with self._lock:
            stream = self._recording.metrics
            known = stream.names
            columns = ["step", "time", *([name for name in names if name in known] if names else known)]
            table = stream.table(columns)
        return {"names": known, "columns": {name: numbers(table[name]) for name in columns}}

    def config(self) -> dict[str, Any]:
        """The configuration of the newest attempt: full key → value."""
        return flatten(self._recording.run.get("config") or {})

    def events(self) -> list[dict[str, Any]]:
        """All events."""
        with self._lock:
            return self._recording.events.table().to_pylist()

    def groups(self, step: int) -> dict[str, Any]:
        """The groups of a step, by column, and which part of them has recorded responses."""
        with self._lock:
            table = self._recording.groups.table(_GROUP_FIELDS, step=step)
            has_responses = step in self._recording.trajectories.steps
            sample = self._recording.trajectories.metadata(step) if has_responses else {}
        return {"step": step, "columns": column_lists(table), "has_responses": has_responses, "sample": sample}

    def group(self, step: int, uid: str) -> dict[str, Any]:
        """The responses to a prompt, without per-token columns."""
        with self._lock:
            table = self._recording.trajectories.table([*_ANSWER_FIELDS, "mask"], step=step, uid=uid)
        if not len(table):
            raise RecordingError(f"step {step} has no recorded responses to the prompt {uid}.")
        lengths, trained = [], []
        for mask in table["mask"]:
            values = np.asarray(mask.values if mask.is_valid else [], np.uint8)
            lengths.append(len(values))
            trained.append(int(values.sum()))
        rows = table.drop(["mask"]).to_pylist()
        responses = merge_responses(rows, lengths, trained)
        return {"step": step, "uid": uid, "prompt": rows[0]["prompt"], "responses": responses}

    def response(self, step: int, uid: str, sample: int) -> dict[str, Any]:
        """One response: its rows with texts, tokens and all per-token columns."""
        responses = self.responses(step, uid, sample)
        if sample not in responses:
            raise RecordingError(f"step {step} has no recorded response {sample} to the prompt {uid}.")
        return responses[sample]

    def responses(self, step: int, uid: str, sample: int | None = None) -> dict[int, dict[str, Any]]:
        """All responses to a prompt (or only `sample`) by their number, each as `response` returns it."""
        fields = [*_ANSWER_FIELDS, *_TOKEN_FIELDS, "prompt_ids", "token_ids"]
        responses: dict[int, dict[str, Any]] = {}
        with self._lock:
            table = self._recording.trajectories.table(fields, step=step, uid=uid)
            if sample is not None:
                table = table.filter(pc.equal(table["sample_index"], sample))
            for number in range(len(table)):
                part = self._part(table.slice(number, 1))
                response = {"step": step, "uid": uid, "sample": part["sample_index"], "parts": []}
                responses.setdefault(part["sample_index"], response)["parts"].append(part)
        return responses

    def rows(self, step: int) -> dict[str, Any]:
        """The rows of a step of fine-tuning, by column, with the beginnings of their prompts."""
        with self._lock:
            table = self._recording.rows.table(_ROW_FIELDS, step=step)
            return {"step": step, "columns": _with_previews(table), "sample": self._recording.rows.metadata(step)}

    def row(self, step: int, uid: str) -> dict[str, Any]:
        """One row of fine-tuning: texts, tokens and per-token columns."""
        fields = ("prompt", "turns", "loss", "trained_tokens", "recorded")
        with self._lock:
            columns = [*fields, *_ROW_TOKEN_FIELDS, "prompt_ids", "token_ids"]
            table = self._recording.rows.table(columns, step=step, uid=uid)
            if not len(table) or not table["recorded"][0].as_py():
                raise RecordingError(f"step {step} has no recorded tokens of the row {uid}.")
            part = table.select(fields).slice(0, 1).to_pylist()[0] | self._tokens(table, _ROW_TOKEN_FIELDS)
        return {"step": step, "uid": uid, "parts": [part]}

    def pairs(self, step: int) -> dict[str, Any]:
        """The pairs of a step of a reward model, by column, with the beginnings of their prompts."""
        with self._lock:
            table = self._recording.pairs.table(_PAIR_FIELDS, step=step)
            return {"step": step, "columns": _with_previews(table), "sample": self._recording.pairs.metadata(step)}

    def pair(self, step: int, uid: str) -> dict[str, Any]:
        """The texts of a pair: prompt, chosen and rejected response."""
        with self._lock:
            table = self._recording.pairs.table(["prompt", "chosen", "rejected"], step=step, uid=uid)
        if not len(table):
            raise RecordingError(f"step {step} has no recorded pair {uid}.")
        return {"step": step, "uid": uid, **table.slice(0, 1).to_pylist()[0]}

    def timeline(self, first: int, last: int) -> dict[str, Any]:
        """Tracks with the phases of these steps, idle time, waits, and the events during these steps."""
        with self._lock:
            phases = self._recording.without_superseded(self._recording.phases.table())
            events = self._recording.events.table()
        return values.tracks(phases, events, first, last)

    def series(self) -> dict[str, Any]:
        """Engine and device series, and the planned and measured memory."""
        with self._lock:
            recorded = self._recording
            names = [name for name in recorded.metrics.names if values.is_memory(name)]
            memory = values.memory(recorded.events.table(), recorded.metrics.table(names))
            return values.series(recorded.engines.table(), recorded.devices.table()) | {"memory": memory}

    def validation(self) -> dict[str, Any]:
        """Every validation prompt with its mean score and share of correct responses, for every validation."""
        with self._lock:
            steps = self._recording.validation.steps
            columns = [self._step_value("validation", step, self._validation_means) for step in steps]
            first: dict[str, int] = {}
            for step, means in zip(steps, columns, strict=True):
                for uid in means:
                    first.setdefault(uid, step)
            prompts = self._validation_prompts(first)
        return {
            "steps": steps,
            "prompts": prompts,
            "score": [[means.get(p["uid"], (None, None))[0] for means in columns] for p in prompts],
            "correct": [[means.get(p["uid"], (None, None))[1] for means in columns] for p in prompts],
        }

    def validation_responses(self, uid: str) -> list[dict[str, Any]]:
        """The responses to a validation prompt in every validation."""
        with self._lock:
            parts = [self._recording.validation.table(_VALIDATION_FIELDS, step=step, uid=uid)
                     for step in self._recording.validation.steps]  # fmt: skip
        return [_validation_response(row) for part in parts for row in part.to_pylist()]

    def validation_responses_of(self, uids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """`validation_responses` of several prompts, with one pass over the recording."""
        responses: dict[str, list[dict[str, Any]]] = {uid: [] for uid in uids}
        with self._lock:
            for _, table in self._recording.validation.iterate([*_VALIDATION_FIELDS, "uid"]):
                for row in table.filter(pc.is_in(table["uid"], pa.array(uids))).to_pylist():
                    responses[row.pop("uid")].append(_validation_response(row))
        return responses

    def health(self) -> list[dict[str, Any]]:
        """The findings of all health rules."""
        with self._lock:
            now = time.time()
            # A run that records nothing more is checked again every minute: it may have stalled.
            key = (int(now // 60), *self.state())
            if self._health is None or self._health[0] != key:
                self._health = (key, health.findings(health.load(self._recording, now, self._health_cache)))
            return [finding._asdict() for finding in self._health[1]]

    def search(self, text: str, step: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield for every step, the newest first (or only `step`), the responses whose text contains `text`.

        Raises RecordingError before the first step if `step` is not recorded.
        """
        with self._lock:
            is_supervised = not self._recording.trajectories.steps
            stream = self._recording.rows if is_supervised else self._recording.trajectories
            columns = ["uid", "turns"] if is_supervised else ["uid", "turns", "sample_index"]
            steps = stream.steps
        if step is not None and step not in steps:
            raise RecordingError(f"step {step} has no recorded responses.")
        return self._search_steps(stream, columns, reversed(steps) if step is None else [step], text)

    # ---------------------------------------------------------------- parts

    def _search_steps(
        self, stream: StepStream, columns: Sequence[str], steps: Iterable[int], text: str
    ) -> Iterator[dict[str, Any]]:
        for step in steps:
            with self._lock:
                table = stream.table(columns, step=step)
            yield {"step": step, "hits": _hits(table, text), "responses": len(table)}

    def _part(self, row: pa.Table) -> dict[str, Any]:
        """One row of a response, with per-token columns."""
        part = row.select(list(_ANSWER_FIELDS)).to_pylist()[0]
        part["rewards"] = dict(part["rewards"] or ())
        return part | self._tokens(row, _TOKEN_FIELDS)

    def _tokens(self, row: pa.Table, fields: Sequence[str]) -> dict[str, Any]:
        """Tokens of the first row, and its columns with a value per token."""
        return {
            "tokens": self._texts(row["token_ids"][0]),
            "token_ids": row["token_ids"][0].as_py(),
            "prompt_tokens": self._texts(row["prompt_ids"][0]),
            "columns": {name: numbers(row[name][0].values) for name in fields if row[name][0].is_valid},
        }

    def _status(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`status` (running, silent, finished or failed), its `message`, and the time of the last record."""
        updated = max(_stamp(self.folder / name) for name in _FILES) / 1e9
        last = next((e for e in reversed(events) if e["kind"] in ("start", "resume", "end")), None)
        if last is not None and last["kind"] == "end":
            status = "failed" if last["message"] else "finished"
            return {"status": status, "message": last["message"] or "", "updated": last["time"]}
        is_silent = time.time() - updated > _SILENT_S
        return {"status": "silent" if is_silent else "running", "message": "", "updated": updated}

    @cached_property
    def _vocabulary(self) -> pa.Array:
        texts = self._recording.tokens.table(["text"])["text"]
        return texts.combine_chunks() if len(texts) else pa.array([], pa.string())

    def _texts(self, ids: pa.ListScalar) -> list[str | None] | None:
        """Texts of tokens; None for redacted and unknown ones, and None if there are no ids."""
        if not ids.is_valid:
            return None
        if not len(self._vocabulary):
            self.__dict__.pop("_vocabulary")  # read it again: a run writes it after its first records
        values = ids.values
        known = pc.and_(pc.greater_equal(values, 0), pc.less(values, len(self._vocabulary)))
        return self._vocabulary.take(pc.if_else(known, values, None)).to_pylist()

    def _step_value(self, stream: str, step: int, compute: Callable[[int], _Result]) -> _Result:
        """`compute(step)`, computed again only if the file of the step has changed."""
        stamp, key = _stamp(self.folder / schema.step_file(stream, step)), (compute.__name__, step)
        if self._cache.get(key, (None,))[0] != stamp:
            self._cache[key] = (stamp, compute(step))
        result: _Result = self._cache[key][1]
        return result

    def _validation_means(self, step: int) -> dict[str, tuple[float | None, float | None]]:
        table = self._recording.validation.table(["uid", "score", "correct"], step=step)
        table = table.set_column(2, "correct", table["correct"].cast(pa.float64()))
        means = table.group_by("uid", use_threads=False).aggregate([("score", "mean"), ("correct", "mean")])
        rows = zip(means["uid"].to_pylist(), numbers(means["score_mean"]), numbers(means["correct_mean"]), strict=True)
        return {uid: (score, correct) for uid, score, correct in rows}

    def _validation_prompts(self, first: Mapping[str, int]) -> list[dict[str, Any]]:
        """Source and beginning of every prompt. `first`: for each uid, the first step that has this prompt."""
        prompts: dict[str, dict[str, Any]] = {}
        for step in dict.fromkeys(first.values()):
            table = self._recording.validation.table(["uid", "data_source", "prompt"], step=step)
            for row in table.to_pylist():
                text = (row["prompt"] or "")[:_MAX_PROMPT_CHARS]
                prompts.setdefault(row["uid"], {"uid": row["uid"], "source": row["data_source"], "prompt": text})
        return [prompts[uid] for uid in first]


def _validation_response(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "rewards": dict(row["rewards"] or ())}


def _with_previews(table: pa.Table) -> dict[str, list[Any]]:
    """The columns as lists, with the beginning of every `prompt`."""
    place = table.column_names.index("prompt")
    previews = pc.utf8_slice_codeunits(table["prompt"], 0, _MAX_PROMPT_CHARS)
    return column_lists(table.set_column(place, "prompt", previews))


def _hits(table: pa.Table, text: str) -> list[dict[str, Any]]:
    turns = table["turns"].combine_chunks()
    texts = turns.flatten().field("text")
    matches = pc.fill_null(pc.match_substring(texts, text, ignore_case=True), False)
    parents, indices = turns.value_parent_indices(), np.flatnonzero(matches.to_numpy(zero_copy_only=False))
    hits = []
    for index in indices.tolist():
        row, content = parents[index].as_py(), texts[index].as_py()
        place = content.lower().find(text.lower())
        start = max(0, place - _EXCERPT_CHARS)
        excerpt = content[start : place + len(text) + _EXCERPT_CHARS]
        sample = table["sample_index"][row].as_py() if "sample_index" in table.column_names else 0
        hits.append({"uid": table["uid"][row].as_py(), "sample": sample, "text": excerpt})
    return hits


def _stamp(path: Path) -> int:
    """Modification time in nanoseconds; 0 if there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _names(text: str) -> list[str]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("not a list of strings")
    return names


QUERIES: dict[str, tuple[Callable[..., Any], dict[str, Callable[[str], Any]]]] = {
    "metrics": (ViewedRun.metrics, {"names": _names}),
    "config": (ViewedRun.config, {}),
    "events": (ViewedRun.events, {}),
    "groups": (ViewedRun.groups, {"step": int}),
    "group": (ViewedRun.group, {"step": int, "uid": str}),
    "answer": (ViewedRun.response, {"step": int, "uid": str, "sample": int}),
    "rows": (ViewedRun.rows, {"step": int}),
    "row": (ViewedRun.row, {"step": int, "uid": str}),
    "pairs": (ViewedRun.pairs, {"step": int}),
    "pair": (ViewedRun.pair, {"step": int, "uid": str}),
    "timeline": (ViewedRun.timeline, {"first": int, "last": int}),
    "series": (ViewedRun.series, {}),
    "validation": (ViewedRun.validation, {}),
    "validation_answers": (ViewedRun.validation_responses, {"uid": str}),
    "health": (ViewedRun.health, {}),
}
"""Queries of a run by name: the method, and the parsers of its parameters."""
