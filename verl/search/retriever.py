"""Retriever: questions in, documents out. Its index is built once for each corpus and setting, and kept on disk."""

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

# A family of encoders is dense retrieval with the words that they were trained with.
RETRIEVERS = ("bm25", "dense", *dense.FAMILIES)
DEFAULT_TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 1024
MAX_QUERY_CHARACTERS = 8192
MAX_QUERY_WORDS = 512
"""A word is compared with every document that has it: the time of a query is proportional to its words."""
MAX_REQUEST_WORDS = 16384
"""Of all queries of a request."""
_WORD = re.compile(r"\w\w+")

logger = logging.getLogger(__name__)


class Hit(NamedTuple):
    """A document that was found, the better the higher its score."""

    document: Document
    score: float


class QueryLimit(ValueError):
    """A query that is too long, or too many of them; the message names the field and the limit."""


class Index(Protocol):
    """What is asked for the numbers of documents."""

    documents: int

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(document, score) of the best `k` of every query, the best first."""
        ...


class Retriever:
    """Answers from a corpus in this process; `retrieve` may be called from any thread."""

    def __init__(self, corpus: Corpus, index: Index, topk: int = DEFAULT_TOPK) -> None:
        if index.documents != len(corpus):
            raise ValueError(
                f"the index has {index.documents} documents and {corpus.path} has {len(corpus)}: it is of another "
                "corpus. Give the corpus it was made from, or leave out --index_path to build one."
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
        found = self._index.search(queries, self.topk if topk is None else topk)
        return [[Hit(self.corpus[row], score) for row, score in rows] for rows in found]


def check_queries(queries: Sequence[str], topk: int | None = None, max_queries: int = MAX_QUERIES) -> None:
    """Raise QueryLimit for a request beyond the limits: its queries, their lengths and words, and `topk`.

    Takes time proportional to the text, up to the first query that is too long.
    """
    _check_topk(topk)
    if len(queries) > max_queries:
        raise QueryLimit(f"queries: {len(queries)} in one request; at most {max_queries} are answered.")
    words = sum(_check_query(query) for query in queries)
    if words > MAX_REQUEST_WORDS:
        raise QueryLimit(f"queries: {words} words in one request; at most {MAX_REQUEST_WORDS} are answered.")


def _check_topk(topk: int | None) -> None:
    if topk is not None and not 1 <= topk <= MAX_TOPK:
        shown = str(topk) if abs(topk) < 10**12 else "a number of more than 12 digits"
        raise QueryLimit(f"topk: {shown}. Give a number from 1 to {MAX_TOPK}.")


def _check_query(query: str) -> int:
    """The number of its words."""
    if len(query) > MAX_QUERY_CHARACTERS:
        raise QueryLimit(
            f"queries: a query has {len(query)} characters; at most {MAX_QUERY_CHARACTERS} are answered. Shorten it."
        )
    words = len(_WORD.findall(query))
    if words > MAX_QUERY_WORDS:
        raise QueryLimit(f"queries: a query has {words} words; at most {MAX_QUERY_WORDS} are answered. Shorten it.")
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
    """A retriever on a corpus, whose index is built now unless it is there.

    `index_path`: a folder to keep indices in (else `search/` under $VERL_CACHE or ~/.cache/verl), or a file of faiss
    that was made elsewhere, document by document in the corpus' order. `model`: the encoder of `dense`, a folder or a
    hub name.
    """
    if name not in RETRIEVERS:
        raise ValueError(f"retriever_name: {name!r} is not known. Use {' or '.join(RETRIEVERS)}.")
    given = None if index_path is None else Path(expand_path(index_path)).absolute()
    home = cache_root() / "search" if given is None or given.is_file() else given
    _refuse_lucene(given)
    corpus = Corpus(corpus_path, home)
    if name == "bm25":
        folder = _built(home, corpus, bm25.SETTINGS, lambda target: bm25.build_bm25(corpus, target))
        return Retriever(corpus, bm25.BM25Index(folder), topk)
    if model is None:
        raise ValueError(f"retriever_name={name} needs an encoder: give --retriever_model, a folder or a hub name.")
    files, family = copy_to_local(model, key="--retriever_model"), {"family": name} if name in dense.FAMILIES else {}
    from_hub = not Path(expand_path(model)).exists()  # into a folder whose name is a hash
    encoder = dense.Encoder(
        files, called=name if family else model.rstrip("/").rpartition("/")[2] if from_hub else None
    )
    if given is not None and given.is_file():
        return Retriever(corpus, dense.DenseIndex(given, encoder, faiss_gpu), topk)
    settings = dense.SETTINGS | {"model": _files_of(Path(files))} | family
    folder = _built(home, corpus, settings, lambda target: dense.build_dense(corpus, target, encoder))
    return Retriever(corpus, dense.DenseIndex(folder, encoder, faiss_gpu), topk)


def _built(home: Path, corpus: Corpus, settings: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder of the index with this content and these settings; one process builds it, the others wait."""
    key = hashlib.sha256(json.dumps([corpus.digest, settings], sort_keys=True).encode()).hexdigest()[:24]
    target = home / f"{settings['retriever']}-{key}"
    if target.exists():
        logger.info("index of %s: %s", corpus.path, target)
        return target

    def timed(partial: Path) -> None:
        begin = time.monotonic()
        logger.info("indexing %d documents of %s into %s", len(corpus), corpus.path, target)
        build(partial)
        logger.info("indexed in %.1f s", time.monotonic() - begin)

    home.mkdir(parents=True, exist_ok=True)
    return Path(create_once(target, timed))


def _files_of(folder: Path) -> list[Any]:
    """Changes when the model in a folder does."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _refuse_lucene(index_path: Path | None) -> None:
    if index_path is not None and index_path.is_dir() and any(index_path.glob("segments_*")):
        raise ValueError(
            f"--index_path: {index_path} is an index of Lucene (pyserini), which is not read here. Leave it out: BM25 "
            "is built from --corpus_path once, and kept."
        )
