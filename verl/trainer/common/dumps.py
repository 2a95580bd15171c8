"""Dumps for inspection: batches as tensors, responses as JSONL files, and the texts of responses.

Texts are decoded once per batch, for the recording, the JSONL files and validation: `row_texts` decodes rows,
`response_texts` joins the rows of each response, and `json_line` is the line of a response in
`trainer.rollout_data_dir` and `trainer.validation_data_dir`.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from verl.algos.groups import Trajectories
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.trainer.recovery.step_end import NonFatalFailures
from verl.utils.concurrency import JobThread
from verl.utils.dataset.rows import ground_truth_of
from verl.utils.disk import atomic_write
from verl.utils.nested import save_tensors

# Files that may wait for the thread.
_MAX_PENDING = 2
# Characters that JSON does not escape, but that readers such as `str.splitlines` treat as line breaks.
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}

Turn: TypeAlias = dict[str, Any]
"""`source` (model, environment), `name` (of the tool), `tokens` (number), `reward` and `text`."""

FINISHED = "finished"
_LINE_FIELDS = ("step", "input", "output", "gts", "score", "rows", "turns", "status")
# Columns that may contain the ground truth.
_GROUND_TRUTH_COLUMNS = ("reward_model", "ground_truth")


def dump_batch(batch: DataProto, folder: str, step: int) -> Path:
    """Write `debug_step_N.pt`: a dict of the step's tensors, for `torch.load(…, weights_only=True)`."""
    path = Path(folder) / f"debug_step_{step}.pt"
    save_tensors(dict(batch.tensors()), path)
    return path


class ResponseFiles:
    """Writes JSONL files of responses in a background thread, each atomically. A file that cannot be written is a
    non-fatal failure, which is reported by a later `submit`, by `report` or by `wait`."""

    def __init__(self, thread: JobThread, failures: NonFatalFailures, redaction: Redaction) -> None:
        self._thread, self._failures, self._redaction = thread, failures, redaction
        self._pending: deque[_PendingFile] = deque()

    def submit(self, key: str, folder: str, step: int, lines: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Write `lines()`, which the thread calls, to `folder/<step>.jsonl`. `key`: configuration key of the folder.

        Waits if two earlier files are pending: their batches are in memory.
        """
        while len(self._pending) >= _MAX_PENDING:
            self._report_first()
        path = Path(folder) / f"{step}.jsonl"
        written = self._thread.submit(lambda: write_jsonl(lines(), path, self._redaction))
        self._pending.append(_PendingFile(key, folder, step, written))

    def report(self) -> None:
        """Report failures of the files that are finished."""
        while self._pending and self._pending[0].written.done():
            self._report_first()

    def wait(self, essential: bool = False) -> None:
        """Wait until all files are written, and report failures. `essential`: raise the first one instead."""
        while self._pending:
            if essential:
                self._pending.popleft().written.result()
            else:
                self._report_first()

    def _report_first(self) -> None:
        file = self._pending.popleft()
        self._failures.dump(file.key, file.folder, file.step, file.written.result)


class _PendingFile(NamedTuple):
    key: str
    folder: str
    step: int
    written: Future[Path]


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path, redaction: Redaction | None = None) -> Path:
    """Write one JSON object per line atomically; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        for row in rows:
            value = plain_value(row) if redaction is None else redaction.value(plain_value(row), keys=True)
            line = json.dumps(value, ensure_ascii=False, default=str).translate(_LINE_BREAKS)
            stream.write(f"{line}\n".encode())
    return path


def decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Return the texts without special tokens."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def plain_value(value: Any) -> Any:
    """Return nested values of numpy as Python values; NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain_value(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RowTexts(NamedTuple):
    """Texts of rows, without special tokens."""

    prompts: list[str]
    responses: list[str]
    """With the texts of tools."""
    turns: list[list[Turn]]


def row_texts(
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    agent_turns: Sequence[Any] | np.ndarray | None,
) -> RowTexts:
    """Decode rows. `prompts`, `responses`: token ids of each row. `agent_turns`: the column of this name (None: each
    response is one turn of the model)."""
    turns = turn_texts(tokenizer, responses, agent_turns)
    if agent_turns is None:
        whole = [row[0]["text"] for row in turns]
    else:
        whole = decode(tokenizer, [ids.tolist() for ids in responses])
    return RowTexts(prompt_texts(tokenizer, prompts), whole, turns)


def texts_of_batch(batch: DataProto, tokenizer: Any) -> RowTexts:
    """Decode all rows of a batch in this process."""
    prompts, responses, mask = (batch.batch[name].cpu().numpy() for name in ("prompts", "responses", "attention_mask"))
    width = responses.shape[1]
    ids = unpadded(prompts, mask[:, :-width].sum(1), align_right=True), unpadded(responses, mask[:, -width:].sum(1))
    return row_texts(tokenizer, *ids, batch.non_tensor_batch.get("agent_turns"))


def prompt_texts(tokenizer: Any, prompts: Sequence[np.ndarray]) -> list[str]:
    """Decode prompts. Equal ones, such as those of a group, are decoded once."""
    unique = {ids.tobytes(): ids.tolist() for ids in prompts}
    texts = dict(zip(unique, decode(tokenizer, list(unique.values())), strict=True))
    return [texts[ids.tobytes()] for ids in prompts]


def turn_texts(
    tokenizer: Any, responses: Sequence[np.ndarray], agent_turns: Sequence[Any] | np.ndarray | None
) -> list[list[Turn]]:
    """Return the turns of each row with their texts. A turn that exceeds a truncated response is truncated, too."""
    turns, pieces = turns_of_rows(agent_turns, [len(ids) for ids in responses]), []
    for ids, row in zip(responses, turns, strict=True):
        end = 0
        for turn in row:
            start, end = end, end + turn["tokens"]
            pieces.append(ids[start:end].tolist())
    texts = iter(decode(tokenizer, pieces))
    return [[turn | {"text": next(texts)} for turn in row] for row in turns]


def turns_of_rows(agent_turns: Sequence[Any] | np.ndarray | None, lengths: Sequence[int]) -> list[list[Turn]]:
    """Return the turns of each row without texts. `lengths`: tokens of the responses."""
    if agent_turns is None:
        agent_turns = [[("model", int(length), None, None)] for length in lengths]
    return [[{"source": s, "tokens": n, "name": name, "reward": r} for s, n, name, r in row] for row in agent_turns]


def unpadded(ids: np.ndarray, lengths: np.ndarray, align_right: bool = False) -> list[np.ndarray]:
    """Return the first (`align_right`: the last) `lengths` values of each row."""
    return [row[len(row) - n :] if align_right else row[:n] for row, n in zip(ids, lengths, strict=True)]


class ResponseText(NamedTuple):
    """The texts of a response."""

    prompt: str
    """Of its first row."""
    response: str
    """Of its last row."""
    rows: list[tuple[str, str]] | None = None
    """Prompt and response of every row; None if it has one row."""
    status: str | None = None
    """Of agents: finished, aborted or failed."""
    turns: list[Turn] | None = None
    """Of agents: the turns of all rows."""


def response_texts(texts: RowTexts, trajectories: Trajectories, columns: Mapping[str, Any]) -> list[ResponseText]:
    """Return the texts of every trajectory. `columns`: object columns of the batch."""
    rows_of: list[list[int]] = [[] for _ in range(len(trajectories))]
    for row, number in enumerate(trajectories.of_row):
        rows_of[number].append(row)
    responses = []
    for rows, last in zip(rows_of, trajectories.last_rows, strict=True):
        parts = [(texts.prompts[row], texts.responses[row]) for row in rows]
        status = turns = None
        if "agent_turns" in columns:
            status = (columns["agent_metrics"][rows[0]] or {}).get("status", FINISHED)
            turns = [turn for row in rows for turn in texts.turns[row]]
        all_rows = parts if len(parts) > 1 else None
        responses.append(ResponseText(parts[0][0], texts.responses[last], all_rows, status, turns))
    return responses


def json_line(
    step: int, text: ResponseText, truth: Any, score: float | None, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a response's line. `columns`: further fields; a name in `_LINE_FIELDS` gets the prefix
    `data_`."""
    line = {"step": step, "input": text.prompt, "output": text.response, "gts": truth, "score": score}
    if text.rows is not None:
        line["rows"] = text.rows
    if text.turns is not None:
        line |= {"status": text.status, "turns": [_json_turn(turn) for turn in text.turns]}
    return line | {f"data_{name}" if name in _LINE_FIELDS else name: value for name, value in columns.items()}


def _json_turn(turn: Turn) -> dict[str, Any]:
    described = {"by": turn["name"] or turn["source"], "text": turn["text"]}
    return described if turn["reward"] is None else described | {"reward": turn["reward"]}


def ground_truths(batch: DataProto) -> list[Any]:
    """Return the ground truth of every trajectory; None if the data has none."""
    columns = {name: batch.non_tensor_batch[name] for name in _GROUND_TRUTH_COLUMNS if name in batch.non_tensor_batch}
    rows = Trajectories.of(batch).last_rows
    return [ground_truth_of({name: values[row] for name, values in columns.items()}) for row in rows]
