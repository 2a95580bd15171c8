"""Retriever: finds the best documents of a corpus for queries. Indices are built once per corpus and settings, and kept
on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from verl.search import bm25, dense
from verl.search.corpus import Corpus, Document
from verl.utils.fs import cache_root, copy_to_local, create_once, expand_path

__all__ = [
    "MAX_QUERIES",
    "MAX_QUERY_CHARACTERS",
    "MAX_QUERY_WORDS",
    "MAX_REQUEST_WORDS",
    "MAX_TOPK",
    "RETRIEVERS",
    "Hit",
    "QueryLimit",
    "Retriever",
    "check_queries",
    "open_retriever",
]

# The name of an encoder family selects dense retrieval with the prefixes that its encoders were trained with.
RETRIEVERS = ("bm25", "dense", *dense.FAMILIES)
DEFAULT_TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 1024
MAX_QUERY_CHARACTERS = 8192
MAX_QUERY_WORDS = 512
"""Each word is compared with every document that contains it, so the time of a query grows with its words."""
MAX_REQUEST_WORDS = 16384
"""Maximum number of words of all queries of a request."""
_WORD = re.compile(r"\w\w+")

logger = logging.getLogger(__name__)


class Hit(NamedTuple):
    """A document in a search result; a higher score is better."""

    document: Document
    score: float


class QueryLimit(ValueError):
    """A request beyond the limits on queries; the message names the field and the limit."""


class Index(Protocol):
    """Finds documents by their number in the corpus."""

    documents: int

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(document, score) of the best `k` of every query, the best first."""
        ...


class Retriever:
    """Searches a corpus in this process. `retrieve` may be called from any thread."""

    def __init__(self, corpus: Corpus, index: Index, topk: int = DEFAULT_TOPK) -> None:
        if index.documents != len(corpus):
            raise ValueError(
                f"the index has {index.documents} documents and {corpus.path} has {len(corpus)}: it was built from "
                "another corpus. Use that corpus, or omit --index_path to build an index."
            )
        self.corpus, self.topk = corpus, topk
        self._index = index

    def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Hit]]:
        """The best documents of every query, the best first; fewer than `topk` where fewer match.

        QueryLimit, a ValueError, for a query beyond MAX_QUERY_CHARACTERS or MAX_QUERY_WORDS, or `topk` beyond MAX_TOPK.
        """
        _check_topk(topk)
        for query in queries:
            _check_query(query)
        results = self._index.search(queries, self.topk if topk is None else topk)
        return [[Hit(self.corpus[row], score) for row, score in rows] for rows in results]


def check_queries(queries: Sequence[str], topk: int | None = None) -> None:
    """Raise QueryLimit for a request beyond the limits: its queries, their lengths and words, and `topk`.

    Takes time proportional to the text, up to the first query that is too long.
    """
    _check_topk(topk)
    if len(queries) > MAX_QUERIES:
        raise QueryLimit(f"queries: {len(queries)} in one request; at most {MAX_QUERIES} are accepted.")
    words = sum(_check_query(query) for query in queries)
    if words > MAX_REQUEST_WORDS:
        raise QueryLimit(f"queries: {words} words in one request; at most {MAX_REQUEST_WORDS} are accepted.")


def _check_topk(topk: int | None) -> None:
    if topk is not None and not 1 <= topk <= MAX_TOPK:
        shown = str(topk) if abs(topk) < 10**12 else "a number of more than 12 digits"
        raise QueryLimit(f"topk: {shown}. Give a number from 1 to {MAX_TOPK}.")


def _check_query(query: str) -> int:
    """Return the number of words of a query; raise QueryLimit if it is too long."""
    if len(query) > MAX_QUERY_CHARACTERS:
        raise QueryLimit(
            f"queries: a query has {len(query)} characters; at most {MAX_QUERY_CHARACTERS} are accepted. Shorten it."
        )
    words = len(_WORD.findall(query))
    if words > MAX_QUERY_WORDS:
        raise QueryLimit(f"queries: a query has {words} words; at most {MAX_QUERY_WORDS} are accepted. Shorten it.")
    return words


def open_retriever(
    corpus_path: str,
    name: str = "bm25",
    topk: int = DEFAULT_TOPK,
    *,
    index_path: str | None = None,
    model: str | None = None,
    faiss_gpu: bool = False,
) -> Retriever:
    """Open a retriever for a corpus; its index is built if it does not exist.

    `index_path`: a folder for indices (default: `search/` under $VERL_CACHE or ~/.cache/verl), or a faiss file of
    another program with the documents in the order of the corpus. `model`: the encoder of `dense`, a folder or a hub
    name. Raises ValueError if `topk` is beyond MAX_TOPK.
    """
    _check_topk(topk)
    if name not in RETRIEVERS:
        raise ValueError(f"retriever_name: {name!r} is unknown. Use {' or '.join(RETRIEVERS)}.")
    index = None if index_path is None else Path(expand_path(index_path)).absolute()
    index_root = cache_root() / "search" if index is None or index.is_file() else index
    _reject_lucene(index)
    corpus = Corpus(corpus_path, index_root)
    if name == "bm25":
        folder = _build_once(index_root, corpus, bm25.SETTINGS, lambda target: bm25.build_bm25(corpus, target))
        return Retriever(corpus, bm25.BM25Index(folder), topk)
    if model is None:
        raise ValueError(f"retriever_name={name} needs an encoder. Set --retriever_model to a folder or a hub name.")
    files, family = copy_to_local(model, key="--retriever_model"), {"family": name} if name in dense.FAMILIES else {}
    from_hub = not Path(expand_path(model)).exists()  # then the name of the local folder is a hash
    hub_name = model.rstrip("/").rpartition("/")[2] if from_hub else None
    encoder = dense.TextEncoder(files, name=name if family else hub_name)
    if index is not None and index.is_file():
        return Retriever(corpus, dense.DenseIndex(index, encoder, faiss_gpu), topk)
    settings = dense.SETTINGS | {"model": _file_stats(Path(files))} | family
    folder = _build_once(index_root, corpus, settings, lambda target: dense.build_dense(corpus, target, encoder))
    return Retriever(corpus, dense.DenseIndex(folder, encoder, faiss_gpu), topk)


def _build_once(index_root: Path, corpus: Corpus, settings: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder of the index of this corpus and settings. If it is missing, one process builds it and others wait."""
    key = hashlib.sha256(json.dumps([corpus.digest, settings], sort_keys=True).encode()).hexdigest()[:24]
    target = index_root / f"{settings['retriever']}-{key}"
    if target.exists():
        logger.info("index of %s: %s", corpus.path, target)
        return target

    def timed(partial: Path) -> None:
        start = time.monotonic()
        logger.info("indexing %d documents of %s into %s", len(corpus), corpus.path, target)
        build(partial)
        logger.info("indexed in %.1f s", time.monotonic() - start)

    index_root.mkdir(parents=True, exist_ok=True)
    return Path(create_once(target, timed))


def _file_stats(folder: Path) -> list[Any]:
    """Names, sizes and modification times of a model's files, to detect a changed model."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _reject_lucene(index_path: Path | None) -> None:
    if index_path is not None and index_path.is_dir() and any(index_path.glob("segments_*")):
        raise ValueError(
            f"--index_path: {index_path} is a Lucene index (pyserini), which is not supported. Omit --index_path: "
            "the BM25 index is built once from --corpus_path, and kept."
        )
