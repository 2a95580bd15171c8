"""Corpus: documents in a file of JSON lines {"id", "contents"}, read on demand by the offset of each line.

Texts are not kept in memory, only eight bytes per document.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from verl.utils.disk import atomic_write
from verl.utils.fs import expand_path

__all__ = ["Corpus", "Document", "log_progress", "text_batches", "title_and_text"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

SCAN_BYTES = 1 << 24
_LOG_INTERVAL_S = 10.0
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Document(NamedTuple):
    """A passage; `contents` is `"Title"`, a line break and the text."""

    id: str
    contents: str


class Corpus:
    """The documents of a file by number. `digest`: hash of the contents."""

    def __init__(self, path: str | os.PathLike[str], cache: Path, key: str = "corpus_path") -> None:
        self.path = Path(expand_path(path)).absolute()
        if not self.path.is_file():
            raise ValueError(f"{key}: there is no file {self.path}. Use a file of JSON lines {{id, contents}}.")
        if self.path.suffix in _COMPRESSED:
            raise ValueError(f"{key}: {self.path} is compressed, which random access does not support. Decompress it.")
        stat = self.path.stat()
        if stat.st_size == 0:
            raise ValueError(f"{key}: {self.path} is empty. Use a file of JSON lines {{id, contents}}.")
        file_id = hashlib.sha256(f"{self.path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:32]
        offsets = cache / "corpora" / f"{file_id}.npz"
        if not offsets.is_file():
            _write_offsets(self.path, offsets)
        try:
            self.digest, self._starts = _read_offsets(offsets)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{offsets}: not a valid file of line offsets ({error}). Delete it.") from error
        with self.path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Document:
        start = int(self._starts[row])
        end = self._bytes.find(b"\n", start)
        return _parse_line(self._bytes[start : end if end >= 0 else len(self._bytes)], self.path, start, self._bytes)

    def __iter__(self) -> Iterator[Document]:
        for row in range(len(self)):
            yield self[row]

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()


def title_and_text(contents: str) -> tuple[str, str]:
    """The title (first line, without quotes) and the rest. A single line is text without a title."""
    title, newline, text = contents.partition("\n")
    return (title.strip().strip('"'), text) if newline else ("", contents)


def text_batches(corpus: Corpus, size: int) -> Iterator[list[str]]:
    """The texts of a corpus in order, `size` at a time."""
    texts: list[str] = []
    for document in corpus:
        texts.append(document.contents)
        if len(texts) == size:
            yield texts
            texts = []
    if texts:
        yield texts


def log_progress(batches: Iterable[T], total: int, task: str, size: Callable[[T], int]) -> Iterator[T]:
    """Yield the batches; log the number of processed documents every ten seconds. `size`: documents of a batch."""
    start = last_log = time.monotonic()
    done = 0
    for batch in batches:
        yield batch
        done = min(total, done + size(batch))
        now = time.monotonic()
        if now - last_log >= _LOG_INTERVAL_S:
            last_log = now
            remaining = (now - start) * (total - done) / done
            logger.info("%s: %d of %d documents, about %.0f s left", task, done, total, remaining)


def _write_offsets(path: Path, target: Path) -> None:
    """Write the offsets of all non-empty lines of a file, and a hash of its content, in one pass."""
    digest, offsets, position, at_line_start = hashlib.sha256(), [], 0, True
    with path.open("rb") as file:
        while chunk := file.read(SCAN_BYTES):
            digest.update(chunk)
            characters = np.frombuffer(chunk, np.uint8)
            breaks = np.flatnonzero(characters == ord("\n"))
            starts = np.concatenate([np.zeros(int(at_line_start), np.int64), breaks + 1])
            # A line that begins at the end of this chunk is found in the next one.
            inside = starts[starts < len(characters)]
            offsets.append(inside[characters[inside] != ord("\n")] + position)
            at_line_start, position = bool(chunk.endswith(b"\n")), position + len(chunk)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as out:
        np.savez(out, starts=np.concatenate(offsets).astype(np.int64), digest=np.str_(digest.hexdigest()))


def _read_offsets(file: Path) -> tuple[str, np.ndarray]:
    """(digest, offsets) from a file of `_write_offsets`."""
    with np.load(file, allow_pickle=False) as content:
        if any(member.compress_type != zipfile.ZIP_STORED for member in content.zip.infolist()):
            raise ValueError("it is compressed")
        return str(content["digest"]), content["starts"]


def _parse_line(line: bytes, path: Path, start: int, content: mmap.mmap) -> Document:
    try:
        record = json.loads(line)
        return Document(str(record["id"]), record["contents"] + "")
    except (ValueError, KeyError, TypeError) as error:
        number = content[:start].count(b"\n") + 1
        shown = line[:80].decode(errors="replace")
        raise ValueError(
            f"{path}, line {number}: not a document ({type(error).__name__}: {error}): {shown!r}. "
            'Every line must be a JSON object with "id" and "contents" (text).'
        ) from error
