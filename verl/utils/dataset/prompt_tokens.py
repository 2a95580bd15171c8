"""Token ids of every prompt, made once: with all cores, and kept in a file that later starts and all processes map.

The file is named by everything the tokens depend on: the data files (path, size, time), the column, the template and
the tokenizer. Its folder (`prompts` in $VERL_CACHE) may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.utils.dataset.chat import Messages, PromptEncoder, PromptRefused, prompt_digest
from verl.utils.dataset.problems import DataError
from verl.utils.dataset.rows import Rows, value_at
from verl.utils.dataset.tokens import TOKENS, TokenStore
from verl.utils.fs import cache_root, made_once

logger = logging.getLogger(__name__)

_FORMAT = 1
# Below this, tokenising again is quicker than a person notices, and not worth a file.
_KEPT_FROM_ROWS = 1000
_CHUNK = 2048
_SCHEMA = pa.schema([("ids", TOKENS), ("high", pa.uint64()), ("low", pa.uint64())])


class PromptTokens:
    """Of every row: the prompt's token ids, and a name that its words alone decide."""

    def __init__(self, table: pa.Table, file: str | None = None) -> None:
        self.tokens = TokenStore(table.column("ids"))
        self._digests = np.stack([table.column(name).to_numpy() for name in ("high", "low")])
        self._repeats = _earlier_equals(self._digests)
        self._file = file

    def __reduce__(self) -> Any:
        # By its file where it has one: a process that gets it maps the same memory.
        if self._file is not None:
            return _open, (self._file,)
        columns = {"ids": self.tokens.column, "high": self._digests[0], "low": self._digests[1]}
        return PromptTokens, (pa.table(columns, _SCHEMA),)

    def __len__(self) -> int:
        return len(self.tokens)

    def uid(self, row: int) -> str:
        """The same in every run, wherever the row stands; the second of two equal prompts is another group."""
        name = f"{self._digests[0, row]:016x}{self._digests[1, row]:016x}"
        return f"{name}-{self._repeats[row]}" if self._repeats[row] else name

    def fingerprint(self, rows: np.ndarray) -> str:
        """Changes when the words of one of these rows do, or their order."""
        return hashlib.blake2b(self._digests[:, rows].tobytes(), digest_size=16).hexdigest()


def encode_prompts(rows: Rows, count: int, key: str, encoder: PromptEncoder) -> PromptTokens:
    """The first `count` rows' prompts (at `key`) as tokens; from the file of an earlier start where there is one."""
    name = _file_name(rows, count, key, encoder) if count >= _KEPT_FROM_ROWS else None
    if name is not None:
        try:
            return _kept(cache_root() / "prompts" / name, lambda: _encoded(rows, count, key, encoder), count)
        except OSError as error:
            logger.warning("prompts are tokenised at every start: their tokens cannot be kept (%s)", error)
    return PromptTokens(pa.Table.from_batches(_encoded(rows, count, key, encoder), _SCHEMA))


def _kept(file: Path, encode: Callable[[], Iterator[pa.RecordBatch]], count: int) -> PromptTokens:
    def write(partial: Path) -> None:
        began = time.monotonic()
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
            for batch in encode():
                writer.write_batch(batch)
        logger.info("tokenised %d prompts in %.1f s; kept in %s", count, time.monotonic() - began, file)

    for _ in range(2):
        made_once(file, write)
        try:
            found = _open(str(file))
        except pa.ArrowInvalid as error:
            logger.warning("%s is damaged (%s): tokenising again", file, error)
            file.unlink(missing_ok=True)
        else:
            return found
    raise OSError(f"{file} cannot be read back")


def _open(file: str) -> PromptTokens:
    return PromptTokens(pa.ipc.open_file(pa.memory_map(file)).read_all(), file)


def _encoded(rows: Rows, count: int, key: str, encoder: PromptEncoder) -> Iterator[pa.RecordBatch]:
    """Chunks in order. While one is tokenised, which needs no Python, the template writes the next."""
    waiting: tuple[Future[list[list[int]]], list[Messages]] | None = None
    with ThreadPoolExecutor(1) as pool:
        for first, batch in rows.batches([key.split(".")[0]], _CHUNK):
            if first >= count:
                break
            prompts = [encoder.messages(value_at(row, key)) for row in batch[: count - first]]
            try:
                written = encoder.written(prompts)
            except PromptRefused as error:
                raise DataError([f"{rows.where(first + error.number)}: {error}"]) from error
            if waiting is not None:
                yield _chunk(waiting[0].result(), waiting[1])
            waiting = pool.submit(encoder.tokenised, written), prompts
            if encoder.own_template is not None:
                waiting[0].result()  # it may use the tokenizer, which serves one at a time
        if waiting is not None:
            yield _chunk(waiting[0].result(), waiting[1])


def _chunk(ids: list[list[int]], prompts: list[Messages]) -> pa.RecordBatch:
    words = b"".join(prompt_digest(messages) for messages in prompts)
    digests = np.frombuffer(words, dtype=">u8").reshape(-1, 2).astype(np.uint64)
    columns = [pa.array(ids, TOKENS), pa.array(digests[:, 0]), pa.array(digests[:, 1])]
    return pa.record_batch(columns, schema=_SCHEMA)


def _file_name(rows: Rows, count: int, key: str, encoder: PromptEncoder) -> str | None:
    tokenizer = encoder.fingerprint()
    if tokenizer is None:
        return None
    whole = json.dumps([_FORMAT, rows.versions(), count, key, tokenizer])
    return f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}.arrow"


def _earlier_equals(digests: np.ndarray) -> np.ndarray:
    """How many earlier rows have the same digest; digests: [2, rows]."""
    rows = digests.shape[1]
    order = np.lexsort((np.arange(rows), digests[1], digests[0]))
    ordered = digests[:, order]
    first = np.ones(rows, dtype=bool)
    first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(0)
    places = np.arange(rows)
    found = np.empty(rows, dtype=np.int64)
    found[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return found
