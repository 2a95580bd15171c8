"""Dumps for inspection: batches as tensors, responses as JSONL files."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.trainer.recovery.step_end import NonFatalFailures
from verl.utils.concurrency import JobThread
from verl.utils.disk import atomic_write
from verl.utils.nested import save_tensors

# Files that may wait for the thread.
_MAX_PENDING = 2
# Line breaks that JSON does not escape, but readers that split text into lines recognise.
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def dump_batch(batch: DataProto, folder: str, step: int) -> Path:
    """Write `debug_step_N.pt`: a dict of the step's tensors, for `torch.load(…, weights_only=True)`."""
    path = Path(folder) / f"debug_step_{step}.pt"
    save_tensors(dict(batch.tensors()), path)
    return path


class ResponseFiles:
    """Writes JSONL files of responses in a background thread, each with all lines. A file that cannot be written is a
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
