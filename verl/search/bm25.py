"""BM25 index: searched with bm25s, built here in batches of documents.

bm25s builds an index from the tokens of all documents as Python lists, many times the size of the corpus. Here tokens
are written to a file, and memory contains only the vocabulary and one batch. The result is a sparse matrix of scores
(columns are words, rows documents) in the format of bm25s, by its default method: Lucene's BM25 (Kamphuis et al.,
2020).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.search.corpus import Corpus, log_progress, text_batches

__all__ = ["BM25Index", "build_bm25"]

K1, B = 1.5, 0.75
BATCH_DOCUMENTS = 1 << 12
# A temporary file with the token ids of all documents; the arrays of the sparse matrix (compressed sparse columns).
_TOKENS, _DATA, _INDICES, _INDPTR = "tokens.bin", "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
# Stored with an index: an index with other settings is built again.
SETTINGS = {"retriever": "bm25", "k1": K1, "b": B, "stopwords": "en", "format": 1}

logger = logging.getLogger(__name__)


class BM25Index:
    """An index written by `build_bm25`; its matrix is memory-mapped."""

    def __init__(self, folder: Path) -> None:
        bm25s = import_bm25s()
        try:
            self._index = bm25s.BM25.load(str(folder), mmap=True, allow_pickle=False, show_progress=False)
        except ValueError as error:
            raise ValueError(f"--index_path: {folder} is not a BM25 index of verl ({error}).") from error
        self._vocabulary = self._index.vocab_dict
        self.documents = int(self._index.scores["num_docs"])
        """Number of documents."""

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Return (document, score) of the best `k` documents that contain a word of the query, for every query."""
        known_words = [[word for word in words if word in self._vocabulary] for words in split_words(queries)]
        results: list[list[tuple[int, float]]] = [[] for _ in queries]
        searched = [index for index, words in enumerate(known_words) if words]
        if searched:
            documents, scores = self._index.retrieve(
                [known_words[index] for index in searched], k=min(k, self.documents), show_progress=False
            )
            for index, numbers, values in zip(searched, documents.tolist(), scores.tolist(), strict=True):
                pairs = zip(numbers, values, strict=True)
                results[index] = [(number, value) for number, value in pairs if value > 0]
        return results


def build_bm25(corpus: Corpus, folder: Path) -> None:
    """Write the index of a corpus to a new folder."""
    folder.mkdir(parents=True)
    vocabulary: dict[str, int] = {}
    lengths, document_counts = _write_tokens(corpus, folder / _TOKENS, vocabulary)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(document_counts)])
    write_scores(folder, lengths, document_counts, indptr)
    np.save(folder / _INDPTR, indptr)
    (folder / _TOKENS).unlink()
    (folder / "vocab.index.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "params.index.json").write_text(json.dumps(_parameters(len(corpus))))
    logger.info("bm25: %d documents, %d words, %d entries", len(corpus), len(vocabulary), indptr[-1])


def split_words(texts: Sequence[str]) -> list[list[str]]:
    """Return the lower-case words of two letters or more of every text, without stop words."""
    return import_bm25s().tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)


def import_bm25s() -> Any:
    """Import bm25s; a ValueError says how to install it."""
    try:
        import bm25s
    except ImportError as error:
        raise ValueError("retriever_name=bm25 needs the package bm25s. Run: pip install verl[search]") from error
    return bm25s


def _parameters(documents: int) -> dict[str, Any]:
    """Return the content of the parameter file of bm25s."""
    library_parameters = {"dtype": "float32", "int_dtype": "int32", "method": "lucene", "idf_method": "lucene"}
    return {"k1": K1, "b": B, "delta": 0.5, "num_docs": documents, "backend": "numpy", **library_parameters}


def _write_tokens(corpus: Corpus, file: Path, vocabulary: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """First pass: write the token ids of all documents, and add their words to `vocabulary`.

    Returns the number of tokens of each document, and the number of documents that contain each token.
    """
    lengths, document_counts = np.zeros(len(corpus), np.int32), np.zeros(0, np.int64)
    first = 0
    with file.open("wb") as out:
        for texts in log_progress(text_batches(corpus, BATCH_DOCUMENTS), len(corpus), "bm25: reading", size=len):
            ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words] for words in split_words(texts)]
            counts = np.fromiter(map(len, ids), np.int32, len(ids))
            flat = np.fromiter((token for document in ids for token in document), np.int32, int(counts.sum()))
            out.write(flat.tobytes())
            lengths[first : first + len(ids)] = counts
            first += len(ids)
            new_words = len(vocabulary) - len(document_counts)
            document_counts = np.concatenate([document_counts, np.zeros(new_words, np.int64)])
            tokens, _, _ = _count_tokens(flat, counts)
            document_counts += np.bincount(tokens, minlength=len(vocabulary))
    return lengths, document_counts


def write_scores(folder: Path, lengths: np.ndarray, document_counts: np.ndarray, indptr: np.ndarray) -> None:
    """Second pass: write scores and documents, column by column (token), documents in ascending order.

    `indptr` [tokens + 1]: first entry of each column. A batch of documents continues every column where the previous
    batch ended.
    """
    entries, documents = int(indptr[-1]), len(lengths)
    for name, dtype in ((_DATA, np.float32), (_INDICES, np.int32)):
        np.lib.format.open_memmap(folder / name, "w+", dtype, (entries,))
    idf = np.log1p((documents - document_counts + 0.5) / (document_counts + 0.5)).astype(np.float32)
    mean_length = lengths.mean(dtype=np.float64)
    next_entry = indptr[:-1].copy()
    with (folder / _TOKENS).open("rb") as source:
        for first in log_progress(
            range(0, documents, BATCH_DOCUMENTS), documents, "bm25: scoring", size=lambda _: BATCH_DOCUMENTS
        ):
            counts = lengths[first : first + BATCH_DOCUMENTS]
            flat = np.frombuffer(source.read(int(counts.sum()) * 4), np.int32)
            tokens, rows, frequencies = _count_tokens(flat, counts)
            norm = K1 * (1 - B + B * counts[rows] / mean_length)
            # Entries of a token are consecutive: their number within the token, from 0.
            token_starts = np.flatnonzero(np.diff(tokens, prepend=-1))
            rank = np.arange(len(tokens)) - np.repeat(token_starts, np.diff(token_starts, append=len(tokens)))
            entry = next_entry[tokens] + rank
            # Mapped anew for each batch: the pages of a closed map can be evicted.
            np.load(folder / _DATA, mmap_mode="r+")[entry] = idf[tokens] * frequencies / (frequencies + norm)
            np.load(folder / _INDICES, mmap_mode="r+")[entry] = rows + first
            next_entry += np.bincount(tokens, minlength=len(next_entry))


def _count_tokens(flat: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, documents, frequencies) of all pairs of a token and a document that contains it, sorted by token
    and then by document.

    `flat`: tokens of the documents of a batch, one after the other. `counts`: their numbers of tokens. Documents are
    numbered within the batch.
    """
    if not len(flat):
        return flat.astype(np.int64), flat.astype(np.int64), flat
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    pairs, frequencies = np.unique(flat.astype(np.int64) * len(counts) + rows, return_counts=True)
    return pairs // len(counts), pairs % len(counts), frequencies
