"""A corpus on disk: JSON lines of {"id", "contents"}, read one at a time by where each line begins.

Neither building an index nor answering from it holds the texts: memory has eight bytes for each document.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from verl.utils.disk import atomic_write
from verl.utils.fs import expand_path

__all__ = ["Corpus", "Document", "title_and_text"]

_PORTION = 1 << 24
_UNPLAIN = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Document(NamedTuple):
    """A passage that is searched for; `contents` is `"Title"`, a line break and the text."""

    id: str
    contents: str


class Corpus:
    """The documents of a file by number. `digest` names what is in it, wherever it lies."""

    def __init__(self, path: str | os.PathLike[str], cache: Path, key: str = "corpus_path") -> None:
        self.path = Path(expand_path(path)).absolute()
        if not self.path.is_file():
            raise ValueError(f"{key}: there is no file {self.path}. Give a file of JSON lines {{id, contents}}.")
        if self.path.suffix in _UNPLAIN:
            raise ValueError(f"{key}: {self.path} is compressed; documents are read by their place. Unpack it first.")
        stat = self.path.stat()
        if stat.st_size == 0:
            raise ValueError(f"{key}: {self.path} is empty. Give a file of JSON lines {{id, contents}}.")
        seen = hashlib.sha256(f"{self.path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:32]
        lines = cache / "corpora" / f"{seen}.npz"
        if not lines.is_file():
            _scan(self.path, lines)
        try:
            self.digest, self._starts = _read_lines(lines)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{lines}: not a list of lines that was written here ({error}). Delete it.") from error
        with self.path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Document:
        start = int(self._starts[row])
        end = self._bytes.find(b"\n", start)
        return _parsed(self._bytes[start : end if end >= 0 else len(self._bytes)], self.path, start, self._bytes)

    def __iter__(self) -> Iterator[Document]:
        for row in range(len(self)):
            yield self[row]

    def close(self) -> None:
        """The file is let go."""
        self._bytes.close()


def title_and_text(contents: str) -> tuple[str, str]:
    """The title (first line, quotes taken off) and the rest; a single line is text without a title."""
    title, newline, text = contents.partition("\n")
    return (title.strip().strip('"'), text) if newline else ("", contents)


def _scan(path: Path, target: Path) -> None:
    """One pass over the file: where every line that is not empty begins, and a digest of everything."""
    digest, portions, position, begins = hashlib.sha256(), [], 0, True
    with path.open("rb") as file:
        while portion := file.read(_PORTION):
            digest.update(portion)
            held = np.frombuffer(portion, np.uint8)
            breaks = np.flatnonzero(held == ord("\n"))
            starts = np.concatenate([np.zeros(int(begins), np.int64), breaks + 1])
            # A line that begins with the next portion is found there; an empty one is none.
            inside = starts[starts < len(held)]
            portions.append(inside[held[inside] != ord("\n")] + position)
            begins, position = bool(portion.endswith(b"\n")), position + len(portion)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as out:
        np.savez(out, starts=np.concatenate(portions).astype(np.int64), digest=np.str_(digest.hexdigest()))


def _read_lines(file: Path) -> tuple[str, np.ndarray]:
    """(digest, places) as `_scan` wrote them."""
    with np.load(file, allow_pickle=False) as content:
        if any(member.compress_type != zipfile.ZIP_STORED for member in content.zip.infolist()):
            raise ValueError("it is compressed")
        return str(content["digest"]), content["starts"]


def _parsed(line: bytes, path: Path, start: int, everything: mmap.mmap) -> Document:
    try:
        record = json.loads(line)
        return Document(str(record["id"]), record["contents"] + "")
    except (ValueError, KeyError, TypeError) as error:
        number = everything[:start].count(b"\n") + 1
        shown = line[:80].decode(errors="replace")
        raise ValueError(
            f"{path}, line {number}: not a document ({type(error).__name__}: {error}): {shown!r}. "
            'A line is a JSON object with "id" and "contents" (text).'
        ) from error
