"""Token sequences of different lengths: stored in one column, truncated, padded; and the prompts of a dataset.

`encode_prompts` tokenises every prompt once, with all cores, and stores the result in a file that later starts and all
processes map. The file is named by everything the tokens depend on: the data files (path, size, time), the column, the
template and the tokenizer. Its folder (`prompts` in $VERL_CACHE) may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from verl.utils.dataset.chat import Messages, PromptEncoder, PromptRejected, prompt_digest
from verl.utils.dataset.problems import DataError
from verl.utils.dataset.rows import Rows, value_at
from verl.utils.fs import cache_root, create_once

logger = logging.getLogger(__name__)

TRUNCATIONS = ("error", "left", "right", "middle")
TOKENS = pa.large_list(pa.int32())
WEIGHTS = pa.large_list(pa.float32())

_FORMAT = 1
# Fewer rows are tokenised in less than a second and get no file.
MIN_CACHED_ROWS = 1000
CHUNK_ROWS = 2048
_SCHEMA = pa.schema([("ids", TOKENS), ("high", pa.uint64()), ("low", pa.uint64())])


class TokenStore:
    """Many token sequences in one arrow column: no object per row, so processes share it, in memory or from a file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column
        self.lengths: np.ndarray = pc.list_value_length(column).to_numpy()

    @classmethod
    def from_sequences(
        cls, sequences: Iterable[Sequence[float] | np.ndarray], kind: pa.DataType = TOKENS
    ) -> TokenStore:
        return cls(pa.chunked_array([pa.array(list(sequences), kind)], kind))

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> np.ndarray:
        """[length of the row], of the column's type, read-only."""
        return self.column[row].values.to_numpy()


def truncate(ids: Sequence[float] | np.ndarray, limit: int, how: str) -> np.ndarray:
    """Return at most `limit` tokens: `left` drops the beginning, `right` the end, `middle` keeps both ends."""
    row = np.asarray(ids)
    if len(row) <= limit:
        return row
    if how == "left":
        return row[len(row) - limit :]
    if how == "right":
        return row[:limit]
    if how == "middle":
        head = limit // 2
        return np.concatenate([row[:head], row[len(row) - (limit - head) :]])
    raise ValueError(
        f"data.truncation: {how!r} is not one of {', '.join(TRUNCATIONS)}, or may not truncate {len(row)} tokens."
    )


def pad_left(ids: np.ndarray, width: int, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [width] with `fill` before the tokens, and the attention mask: int64 [width], 1 on the tokens."""
    row = torch.full((width,), fill, dtype=torch.int64)
    mask = torch.zeros(width, dtype=torch.int64)
    if len(ids):
        row[width - len(ids) :] = torch.from_numpy(ids.astype(np.int64))
        mask[width - len(ids) :] = 1
    return row, mask


class PromptTokens:
    """Token ids of every row's prompt, and a digest that depends only on its messages."""

    def __init__(self, table: pa.Table, file: str | None = None) -> None:
        self.tokens = TokenStore(table.column("ids"))
        self._digests = np.stack([table.column(name).to_numpy() for name in ("high", "low")])
        self._repeats = _count_earlier_equals(self._digests)
        self._file = file

    def __reduce__(self) -> Any:
        # By its file, if any: the receiving process maps the same memory.
        if self._file is not None:
            return _open_tokens, (self._file,)
        columns = {"ids": self.tokens.column, "high": self._digests[0], "low": self._digests[1]}
        return PromptTokens, (pa.table(columns, _SCHEMA),)

    def __len__(self) -> int:
        return len(self.tokens)

    def uid(self, row: int) -> str:
        """Return an id that is the same in every run and independent of the row's position.

        The second of two equal prompts gets another id: it is another group.
        """
        name = f"{self._digests[0, row]:016x}{self._digests[1, row]:016x}"
        return f"{name}-{self._repeats[row]}" if self._repeats[row] else name

    def fingerprint(self, rows: np.ndarray) -> str:
        """Return a text that changes with the messages of these rows or their order."""
        return hashlib.blake2b(self._digests[:, rows].tobytes(), digest_size=16).hexdigest()


def encode_prompts(rows: Rows, count: int, key: str, encoder: PromptEncoder) -> PromptTokens:
    """Return the prompts (at `key`) of the first `count` rows in tokens, from the file of an earlier start if any."""
    name = _file_name(rows, count, key, encoder) if count >= MIN_CACHED_ROWS else None
    if name is not None:
        try:
            return _load_or_create(cache_root() / "prompts" / name, lambda: _encode(rows, count, key, encoder), count)
        except OSError as error:
            logger.warning("prompts are tokenised at every start: their tokens cannot be stored (%s)", error)
    return PromptTokens(pa.Table.from_batches(_encode(rows, count, key, encoder), _SCHEMA))


def _load_or_create(file: Path, encode: Callable[[], Iterator[pa.RecordBatch]], count: int) -> PromptTokens:
    def write(partial: Path) -> None:
        start = time.monotonic()
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
            for batch in encode():
                writer.write_batch(batch)
        logger.info("tokenised %d prompts in %.1f s; stored in %s", count, time.monotonic() - start, file)

    for _ in range(2):
        create_once(file, write)
        try:
            return _open_tokens(str(file))
        except pa.ArrowInvalid as error:
            logger.warning("%s is damaged (%s): tokenising again", file, error)
            file.unlink(missing_ok=True)
    raise OSError(f"{file} cannot be read back")


def _open_tokens(file: str) -> PromptTokens:
    return PromptTokens(pa.ipc.open_file(pa.memory_map(file)).read_all(), file)


def _encode(rows: Rows, count: int, key: str, encoder: PromptEncoder) -> Iterator[pa.RecordBatch]:
    """Chunks in order. One is tokenised, without the GIL, while the template renders the next one."""
    pending: tuple[Future[list[list[int]]], list[Messages]] | None = None
    with ThreadPoolExecutor(1) as pool:
        for first, batch in rows.batches([key.split(".")[0]], CHUNK_ROWS):
            if first >= count:
                break
            prompts = [encoder.messages(value_at(row, key)) for row in batch[: count - first]]
            try:
                rendered = encoder.render(prompts)
            except PromptRejected as error:
                raise DataError([f"{rows.where(first + error.number)}: {error}"]) from error
            if pending is not None:
                yield _chunk(pending[0].result(), pending[1])
            pending = pool.submit(encoder.tokenize, rendered), prompts
            if encoder.user_template is not None:
                pending[0].result()  # it may use the tokenizer, which is not thread-safe
        if pending is not None:
            yield _chunk(pending[0].result(), pending[1])


def _chunk(ids: list[list[int]], prompts: list[Messages]) -> pa.RecordBatch:
    digests = b"".join(prompt_digest(messages) for messages in prompts)
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)
    columns = [pa.array(ids, TOKENS), pa.array(words[:, 0]), pa.array(words[:, 1])]
    return pa.record_batch(columns, schema=_SCHEMA)


def _file_name(rows: Rows, count: int, key: str, encoder: PromptEncoder) -> str | None:
    tokenizer = encoder.fingerprint()
    if tokenizer is None:
        return None
    inputs = json.dumps([_FORMAT, rows.versions(), count, key, tokenizer])
    return f"{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.arrow"


def _count_earlier_equals(digests: np.ndarray) -> np.ndarray:
    """[rows] number of earlier rows with the same digest; digests: [2, rows]."""
    rows = digests.shape[1]
    order = np.lexsort((np.arange(rows), digests[1], digests[0]))
    ordered = digests[:, order]
    first = np.ones(rows, dtype=bool)
    first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(0)
    positions = np.arange(rows)
    counts = np.empty(rows, dtype=np.int64)
    counts[order] = positions - np.maximum.accumulate(np.where(first, positions, 0))
    return counts
