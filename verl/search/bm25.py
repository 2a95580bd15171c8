"""BM25: bm25s answers from a matrix of scores on disk, which is built here a portion of documents at a time.

The library holds all tokens of all documents as Python lists while it builds, many times the size of the corpus. Here
tokens pass through a file, and memory holds the vocabulary and one portion. The result is the library's own format
(columns are words, rows documents), with the scores of its default, Lucene's BM25 (Kamphuis et al., 2020).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.search.corpus import Corpus
from verl.search.progress import portions, reported

__all__ = ["BM25Index", "build_bm25"]

K1, B = 1.5, 0.75
_PORTION = 1 << 12
_TOKENS, _DATA, _INDICES, _INDPTR = "tokens.bin", "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
SETTINGS = {"retriever": "bm25", "k1": K1, "b": B, "stopwords": "en", "format": 1}

logger = logging.getLogger(__name__)


class BM25Index:
    """An index that `build_bm25` made; its matrix stays on disk and is paged in as it is used."""

    def __init__(self, folder: Path) -> None:
        bm25s = library()
        try:
            self._index = bm25s.BM25.load(str(folder), mmap=True, allow_pickle=False, show_progress=False)
        except ValueError as error:
            raise ValueError(f"--index_path: {folder} is not an index of this program ({error}).") from error
        self._known = self._index.vocab_dict
        self.documents = int(self._index.scores["num_docs"])

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(document, score) of the best `k` of every query; fewer where fewer share a word with it."""
        asked = [[word for word in words if word in self._known] for words in split_words(queries)]
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        some = [place for place, words in enumerate(asked) if words]
        if some:
            rows, scores = self._index.retrieve(
                [asked[place] for place in some], k=min(k, self.documents), show_progress=False
            )
            for place, row, score in zip(some, rows.tolist(), scores.tolist(), strict=True):
                found[place] = [(number, value) for number, value in zip(row, score, strict=True) if value > 0]
        return found


def build_bm25(corpus: Corpus, folder: Path) -> None:
    """Write the index of a corpus into a folder."""
    folder.mkdir(parents=True)
    vocabulary: dict[str, int] = {}
    lengths, containing = _write_tokens(corpus, folder / _TOKENS, vocabulary)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(containing)])
    _write_scores(folder, lengths, containing, indptr)
    np.save(folder / _INDPTR, indptr)
    (folder / _TOKENS).unlink()
    (folder / "vocab.index.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "params.index.json").write_text(json.dumps(_parameters(len(corpus))))
    logger.info("bm25: %d documents, %d words, %d entries", len(corpus), len(vocabulary), indptr[-1])


def split_words(texts: Sequence[str]) -> list[list[str]]:
    """Words of two letters or more, in lower case, but for the commonest: of documents and queries alike."""
    return library().tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)


def library() -> Any:
    """bm25s, or how to get it."""
    try:
        import bm25s
    except ImportError as error:
        raise ValueError("retriever_name=bm25 needs the package bm25s. Run: pip install verl[search]") from error
    return bm25s


def _parameters(documents: int) -> dict[str, Any]:
    """What the library reads beside the matrix."""
    library_parameters = {"dtype": "float32", "int_dtype": "int32", "method": "lucene", "idf_method": "lucene"}
    return {"k1": K1, "b": B, "delta": 0.5, "num_docs": documents, "backend": "numpy", **library_parameters}


def _write_tokens(corpus: Corpus, file: Path, vocabulary: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """First pass: token ids one after the other. Returns tokens of each document, documents that contain each token."""
    lengths, containing = np.zeros(len(corpus), np.int32), np.zeros(0, np.int64)
    first = 0
    with file.open("wb") as out:
        for texts in reported(portions(corpus, _PORTION), len(corpus), "bm25: reading", size=len):
            ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words] for words in split_words(texts)]
            counts = np.fromiter(map(len, ids), np.int32, len(ids))
            flat = np.fromiter((one for document in ids for one in document), np.int32, int(counts.sum()))
            out.write(flat.tobytes())
            lengths[first : first + len(ids)] = counts
            first += len(ids)
            if len(containing) < len(vocabulary):
                containing = np.concatenate([containing, np.zeros(len(vocabulary) - len(containing), np.int64)])
            tokens, _, _ = _counted(flat, counts)
            containing += np.bincount(tokens, minlength=len(vocabulary))
    return lengths, containing


def _write_scores(folder: Path, lengths: np.ndarray, containing: np.ndarray, indptr: np.ndarray) -> None:
    """Second pass: every (token, document) has its place in the token's column, documents in ascending order."""
    entries, documents = int(indptr[-1]), len(lengths)
    for name, dtype in ((_DATA, np.float32), (_INDICES, np.int32)):
        np.lib.format.open_memmap(folder / name, "w+", dtype, (entries,))
    idf = np.log1p((documents - containing + 0.5) / (containing + 0.5)).astype(np.float32)
    average = lengths.mean(dtype=np.float64)
    free = indptr[:-1].copy()
    with (folder / _TOKENS).open("rb") as source:
        for first in reported(range(0, documents, _PORTION), documents, "bm25: scoring", size=lambda _: _PORTION):
            counts = lengths[first : first + _PORTION]
            flat = np.frombuffer(source.read(int(counts.sum()) * 4), np.int32)
            tokens, rows, times = _counted(flat, counts)
            norm = K1 * (1 - B + B * counts[rows] / average)
            begins = np.flatnonzero(np.diff(tokens, prepend=-1))
            rank = np.arange(len(tokens)) - np.repeat(begins, np.diff(begins, append=len(tokens)))
            place = free[tokens] + rank
            # Opened for each portion: closed, its pages are the system's to keep or to drop.
            np.load(folder / _DATA, mmap_mode="r+")[place] = idf[tokens] * times / (times + norm)
            np.load(folder / _INDICES, mmap_mode="r+")[place] = rows + first
            free += np.bincount(tokens, minlength=len(free))


def _counted(flat: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token, document, how often), by token and then by document."""
    if not len(flat):
        return flat.astype(np.int64), flat.astype(np.int64), flat
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    pairs, times = np.unique(flat.astype(np.int64) * len(counts) + rows, return_counts=True)
    return pairs // len(counts), pairs % len(counts), times
